"""Play one schedule in a `HandoverWorld`: `choose` picks moves until it is told to stop, then the faults end."""

from __future__ import annotations

import random
from collections.abc import Callable

from handover_world import World

from baton.transfer.source import HandoverSource
from baton.transfer.target import HandoverTarget


def _open(world: World) -> None:
    if world.stream is None or world.stream.broken or world.stream.prefill != world.prefill.life:
        return
    num_blocks = 1 + world.choose(5)
    handover = f"r{world.choose(3)}"  # few names: a name comes again with another epoch
    live = {attempt.handover for attempt in world.decode.opens if not world.decode.ends[attempt]}
    if handover not in live:
        world.decode.open(handover, world.stream.prefill, world.choose(num_blocks + 1), num_blocks)


def _abort(world: World) -> None:
    live = [attempt for attempt in world.decode.opens if not world.decode.ends[attempt]]
    if live:
        world.decode.perform(world.decode.machine.abort(live[world.choose(len(live))], world.now))


def _compute(world: World) -> None:
    prompts = list(world.prefill.prompts)
    if prompts:
        world.prefill.compute(prompts[world.choose(len(prompts))], 1 + world.choose(3))


def _break_down(world: World) -> None:
    prompts = list(world.prefill.prompts)
    if prompts:
        world.prefill.break_down(prompts[world.choose(len(prompts))])


def _freeze(world: World, frozen: bool) -> None:
    world.frozen = frozen


Move = Callable[[World], None]

Deck = tuple[tuple[int, Move], ...]  # (weight, move)

WORK: Deck = (
    (16, _open),
    (30, _compute),
    (30, lambda world: world.deliver_message(to_decode=True, twice=False)),
    (30, lambda world: world.deliver_message(to_decode=False, twice=False)),
    (4, lambda world: world.deliver_message(to_decode=bool(world.choose(2)), twice=True)),
    (12, lambda world: world.deliver_transfer(world.choose(64), fail=False)),
    (12, lambda world: world.prefill.poll()),
    (12, lambda world: world.decode.poll()),
    (24, lambda world: world.decode.answer_reserve()),
    (8, lambda world: world.decode.finish_one(world.choose(8))),
    (8, lambda world: world.decode.run_local(world.new_life("local"), 1 + world.choose(10))),
    (5, _abort),
    (8, lambda world: world.tick(1 + world.choose(2))),
    (10, World.connect),
)
FAULTS: Deck = (
    (1, lambda world: world.tick(20)),
    (2, lambda world: world.break_stream(keep=bool(world.choose(2)), silent=world.choose(4) == 0)),
    (6, lambda world: world.notice_loss(world.choose(4))),
    (6, lambda world: world.deliver_straggler(world.choose(8))),
    (1, lambda world: world.deliver_transfer(world.choose(64), fail=True)),
    (1, lambda world: world.decode.poll(lose=True)),
    (1, lambda world: world.decode.poll(spoil=True)),
    (1, _break_down),
    (1, World.crash_prefill),
    (1, lambda world: world.crash_decode(silent=bool(world.choose(2)))),
    (1, lambda world: _freeze(world, True)),
    (3, lambda world: _freeze(world, False)),
)


def _shuffle(*decks: Deck) -> list[Move]:
    return [move for deck in decks for weight, move in deck for _ in range(weight)]


CALM = _shuffle(WORK, WORK, WORK, WORK, WORK, FAULTS)
WILD = _shuffle(WORK, FAULTS)


def play(world: World, num_moves: int) -> None:
    deck = (CALM, WILD)[world.choose(2)]
    for _ in range(num_moves):
        deck[world.choose(len(deck))](world)
        world.check()
    world.finish()


def play_seed(
    seed: int,
    *,
    make_source: Callable[[], HandoverSource] | None = None,
    make_target: Callable[[], HandoverTarget] | None = None,
) -> World:
    generator = random.Random(seed)
    world = World(lambda n: generator.randrange(n), make_source=make_source, make_target=make_target)
    play(world, num_moves=generator.randrange(50, 600))
    return world
