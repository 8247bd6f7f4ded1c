"""An engine without a model; run as a script, the command line with it, for tests of signals and pipes."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import swiftgen
from swiftgen.cli.app import main
from swiftgen.settings.schema import Preset
from swiftgen.system.errors import SwiftgenError

WORDS = ["Zoë", " saw", " 日本", "\n"]


@dataclasses.dataclass(frozen=True)
class FakeStep:
    """Looks like swiftgen.decoding.decode.StepEvent (a test compares them) without importing PyTorch."""

    token_ids: tuple[int, ...]
    text: str
    stop_reason: str | None = None
    sources: tuple[str, ...] = ()
    draft_depth: int = 2
    num_rows: int = 3
    context_tokens: int = 7
    kv_bytes: int = 1024
    draft_s: float = 0.0
    verify_s: float = 0.001
    sample_s: float = 0.0


class FakeEngine:
    """Writes WORDS in a circle, one token a step; fails after `fail_after` steps if told to."""

    def __init__(
        self, preset: Preset, failure: BaseException | None = None, fail_after: int = 3, step_s: float = 0.0
    ) -> None:
        self.preset = preset
        self.failure, self.fail_after, self.step_s = failure, fail_after, step_s
        self.prompt = ""
        self.seed = -1
        self.exactness = "lossless"
        self.arithmetic: dict[str, object] = {"dtype": "float32", "pass_sizes": [1, 2]}
        self.opened = SimpleNamespace(device=SimpleNamespace(type="cpu"))
        self.loaded = SimpleNamespace(
            source="fake", fingerprint="f00", dtype="torch.float32", device="cpu", max_positions=9000
        )

    def encode(self, prompt: str, *, chat: bool | None = None, system: str | None = None) -> list[int]:
        self.prompt = prompt
        return [100, 101]

    def prepare(self, prompt_tokens: int, num_tokens: int) -> None:
        if prompt_tokens + num_tokens > 9000:
            raise SwiftgenError("9002 positions are needed, the model has 9000", "ask for fewer")

    def stream(
        self,
        prompt: list[int],
        *,
        num_tokens: int,
        seed: int = 0,
        on_prefill: Callable[[int, int], None],
        written: Sequence[int] = (),
    ) -> Iterator[FakeStep]:
        self.seed = seed
        on_prefill(1, 1)
        for i in range(len(written), num_tokens):
            if self.failure and i == self.fail_after:
                raise self.failure
            time.sleep(self.step_s)
            yield FakeStep((i,), WORDS[i % 4], "length" if i == num_tokens - 1 else None)


class FakeLoad:
    """Stands for swiftgen.load and remembers the engine."""

    def __init__(self, **engine_options: Any) -> None:
        self.engine_options = engine_options
        self.engine: FakeEngine | None = None

    def __call__(self, preset: Preset) -> FakeEngine:
        self.engine = FakeEngine(preset, **self.engine_options)
        return self.engine


if __name__ == "__main__":
    vars(swiftgen)["load"] = FakeLoad(step_s=0.005)
    sys.exit(main())
