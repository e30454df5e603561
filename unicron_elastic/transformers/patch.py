"""Have transformers' Trainer go on in place: one call, before its arguments are made."""

from __future__ import annotations

import functools
import sys
from typing import Any

from unicron_elastic.base.extras import Unusable, why_missing

try:
    import accelerate  # noqa: F401
    import transformers
except ImportError as error:
    if why := why_missing(error):
        raise Unusable(why) from error
    raise

from unicron_elastic.accelerate.alone import has_begun
from unicron_elastic.training.of_launcher import of_launcher
from unicron_elastic.training.step.wrong_use import WrongUseError
from unicron_elastic.training.whole_number import check_ranks
from unicron_elastic.transformers.in_place_trainer import InPlaceTrainer, in_place_class
from unicron_elastic.transformers.parts import missing_parts, patch_arguments, versions

_MARK = "_is_of_unicron"


def patch(trainer_class: Any = None, *, ranks: int | None = None, **run_options: Any) -> bool:
    """Have this Trainer's class, and all that are made of it, go on in place when a rank is lost; False if it cannot.

    It is called before TrainingArguments are made. A step has the batches of so many ``ranks``, by default of as many
    as the launcher has started: say it where jobs grow or shrink. ``run_options`` are those of ``unicron_elastic.Run``
    that are no state, as ``snapshot_every``. Where transformers or accelerate are not as they are known, one line says
    so, and nothing is changed. Raises TypeError for what is no Trainer, ValueError for ``ranks`` below 1, and
    WrongUseError if accelerate has begun already.
    """
    kind = transformers.Trainer if trainer_class is None else trainer_class
    if not (isinstance(kind, type) and issubclass(kind, transformers.Trainer)):
        raise TypeError(f"patch() takes transformers.Trainer or a class that is made of it, and not {kind!r}")
    if taken := sorted({"model", "optimizer", "scheduler", "scaler", "trainer"} & set(run_options)):
        raise TypeError(f"patch() got {taken[0]}, which is the Trainer's: options are those of Run that are no state")
    check_ranks(ranks)
    if missing := missing_parts(kind):
        if of_launcher("RANK", 0) == 0:
            sys.stderr.write(
                f"unicron: {versions()} are not as unicron_elastic.transformers knows them ({missing}): the Trainer "
                "trains as it does without, and all ranks begin again after a loss.\n"
            )
        return False
    if has_begun() and of_launcher("WORLD_SIZE", 1) > 1:
        raise WrongUseError(
            "unicron_elastic.transformers.patch() has to stand before TrainingArguments or an Accelerator are made, "
            "which make process groups of their own"
        )
    patch_arguments()
    if _MARK not in vars(kind):
        _patch_init(kind, ranks, run_options)
    return True


def _patch_init(kind: Any, ranks: int | None, run_options: dict[str, Any]) -> None:
    """Have whatever is made of this class be in place from the beginning."""
    plain = kind.__init__

    @functools.wraps(plain)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(self, InPlaceTrainer):
            self.__class__ = in_place_class(type(self), ranks, run_options)
        plain(self, *args, **kwargs)

    kind.__init__ = begin
    setattr(kind, _MARK, True)
