"""From the settings to drafters: one table for those of the engine's thread, one for the networks."""

from __future__ import annotations

from collections.abc import Callable

from baton.actors.engine.drafters.config import DrafterKind
from baton.actors.engine.drafters.context import ModuleContext
from baton.actors.engine.drafters.eagle import make_eagle
from baton.actors.engine.drafters.medusa import make_medusa
from baton.actors.engine.drafters.module import DraftModule
from baton.actors.engine.drafters.mtp import make_mtp

MakeModule = Callable[[ModuleContext], DraftModule]
MODULES: dict[DrafterKind, MakeModule] = {"eagle": make_eagle, "mtp": make_mtp, "medusa": make_medusa}
