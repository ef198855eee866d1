"""From the settings to what drafts: networks beside the runner, lookups on the engine's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.actors.engine.draft_length import CostLengths, FixedLengths
from baton.actors.engine.draft_stage import DraftStage
from baton.actors.engine.drafters.config import DrafterKind, SpeculationConfig
from baton.actors.engine.drafters.context import ModuleContext
from baton.actors.engine.drafters.draft_model import DraftModel, make_draft_model
from baton.actors.engine.drafters.drafter import Drafter, ModuleDrafts
from baton.actors.engine.drafters.eagle import make_eagle
from baton.actors.engine.drafters.grammar import GrammarDrafter
from baton.actors.engine.drafters.medusa import make_medusa
from baton.actors.engine.drafters.module import DraftModule
from baton.actors.engine.drafters.mtp import make_mtp
from baton.actors.engine.drafters.ngram import NgramDrafter
from baton.actors.engine.drafters.suffix import SuffixDrafter
from baton.actors.engine.drafters.taps import Taps
from baton.actors.engine.grammar import GrammarStore
from baton.actors.engine.models.llama import Llama
from baton.actors.engine.models.model import Model
from baton.actors.engine.speculation import DraftSpeculation, NoSpeculation, Speculation

MakeModule = Callable[[ModuleContext], DraftModule]
MODULES: dict[DrafterKind, MakeModule] = {
    "draft_model": make_draft_model,
    "eagle": make_eagle,
    "mtp": make_mtp,
    "medusa": make_medusa,
}
LOOKUPS: dict[DrafterKind, Callable[[int, GrammarStore], Drafter]] = {
    "ngram": lambda min_match, _: NgramDrafter(min_match),
    "suffix": lambda min_match, _: SuffixDrafter(min_match),
    "grammar": lambda _, grammars: GrammarDrafter(grammars),
}
QUIET_STEPS = 8  # that overlap, after one for which a lookup found nothing


@dataclass(frozen=True, slots=True)
class DraftParts:
    """What one rank's runner needs to draft and verify. `model` is the target, tapped where the module reads it."""

    model: Model
    module: DraftModule | None = None
    stage: DraftStage | None = None

    @property
    def num_layers(self) -> int:
        return 0 if self.module is None else self.module.num_layers

    @property
    def own_block_bytes(self) -> int:
        """Memory that the module takes for each block, beside the block's own."""
        return self.module.own_block_bytes if isinstance(self.module, DraftModel) else 0


def make_parts(context: ModuleContext, max_step_tokens: int) -> DraftParts:
    """Load the draft module, if the settings name one. Raises what loading a model raises."""
    make = MODULES.get(context.config.drafter)
    if make is None:
        return DraftParts(context.target)
    module = make(context)
    by_rejection = context.config.acceptance == "rejection"
    if not module.taps:
        return DraftParts(context.target, module, DraftStage(module, keeps_guesses=by_rejection))
    assert isinstance(context.target, Llama)  # or the module would have refused it
    taps = Taps(context.target, module.taps, max_step_tokens)
    return DraftParts(taps.model, module, DraftStage(module, taps, keeps_guesses=by_rejection))


def make_speculation(
    config: SpeculationConfig | None, module: DraftModule | None, grammars: GrammarStore, *, overlap: bool
) -> Speculation:
    """The engine's side, on rank 0."""
    if config is None:
        return NoSpeculation()
    most, lookup = config.max_draft_tokens, LOOKUPS.get(config.drafter)
    quiet_steps = QUIET_STEPS if overlap and lookup is not None else 0
    lengths = FixedLengths() if config.length == "fixed" else CostLengths(most, quiet_steps=quiet_steps)
    drafter = ModuleDrafts() if lookup is None else lookup(config.min_match, grammars)
    return DraftSpeculation(drafter, lengths, most, module_layers=None if module is None else module.num_layers)
