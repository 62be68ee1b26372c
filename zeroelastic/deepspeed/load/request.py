"""One call of ``DeepSpeedEngine.load_checkpoint``: its arguments, and what our block of the configuration adds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from zeroelastic.deepspeed.options import Options
from zeroelastic.io.paths import FilePath, as_path


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The arguments of DeepSpeed's ``load_checkpoint``, by its names, and the ``options`` that hold on all ranks."""

    load_dir: str
    tag: str | None = None
    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False
    custom_load_fn: Callable[..., Any] | None = None
    options: Options = field(default_factory=Options)

    @property
    def directory(self) -> FilePath:
        """The directory of the run; it may be a URL."""
        return as_path(self.load_dir)

    @property
    def weights_only(self) -> bool:
        """Whether optimizer state, hyper-parameters and loss scale stay as the run has them."""
        return self.load_module_only or not self.load_optimizer_states

    @property
    def strict_module(self) -> bool:
        """Whether the module's own entries have to be those of the checkpoint."""
        return self.load_module_strict and self.custom_load_fn is None

    def flags(self) -> dict[str, Any]:
        """The keyword arguments after ``load_dir`` and ``tag``, for DeepSpeed's own methods."""
        return {
            "load_module_strict": self.load_module_strict,
            "load_optimizer_states": self.load_optimizer_states,
            "load_lr_scheduler_states": self.load_lr_scheduler_states,
            "load_module_only": self.load_module_only,
            "custom_load_fn": self.custom_load_fn,
        }
