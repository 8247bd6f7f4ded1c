"""Reliability: real runs are killed, stopped and cut off at random moments; do they go on to the same bytes?

    python tests/tools/reliability.py --kills 25 --tokens 600
    python tests/tools/reliability.py --tiny --kills 10 --parts kill,power
    python tests/tools/reliability.py --preset mine.yaml --set draft=paper --parts full,log

Every case is compared, byte for byte, with a run that was never stopped. The parts:

    kill    SIGKILL while the model is loaded, the prompt is read and the text is written, in turns
    term    SIGTERM at such moments
    five    five kills in one document
    log     the token log cut at every byte of its last two records (in this process)
    full    a full disk: a small tmpfs if one can be mounted, else a limit on the size of files
    power   a power cut: only what was synced is kept (`fsync` is watched); says what was lost

Ends with one JSON line on stdout; exit code 1 if a text was another or something was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swiftgen.document.document import TOKEN_BYTES, TOKENS_NAME, run_folder
from swiftgen.document.manifest import MANIFEST_NAME, read_manifest

PARTS = ("kill", "term", "five", "log", "full", "power")
PHASES = ("loading", "prefill", "decoding")
NAME = "book.txt"
SENTENCE = "The sea was calm when the lighthouse keeper found the map. "
POLL_S = 0.001
TIMEOUT_S = 3600


class Wrong(Exception):
    """A case did not end as it should."""


@dataclass
class Setup:
    """What all cases share.

    Args:
        folder: For documents, each in a folder of its own.
        options: Of `write`, but the name of the file.
        slow_s: Added to every step, for models that are too quick to be killed in the middle.
        whole: The document that was never stopped.
        spans_s: Of each phase, how long it took there.
    """

    folder: Path
    options: list[str]
    slow_s: float
    rng: random.Random
    whole: Path = Path()
    spans_s: dict[str, float] = field(default_factory=dict)
    num_cases: int = 0

    def new_document(self) -> Path:
        """A name in a new folder."""
        self.num_cases += 1
        folder = self.folder / f"case{self.num_cases}"
        folder.mkdir()
        return folder / NAME

    def write(self, path: Path, **how: Any) -> subprocess.Popen[str]:
        """Starts `swiftgen write`."""
        return self.start(["write", *self.options, "-o", str(path)], **how)

    def resume(self, path: Path) -> None:
        """Runs `swiftgen resume` to its end, or `write` where nothing was there yet."""
        process = self.start(["resume", "-q", str(path)]) if run_folder(path).exists() else self.write(path)
        end(process, 0)

    def start(self, args: Sequence[str], store: Path | None = None, limit: int = 0) -> subprocess.Popen[str]:
        """Starts a command line.

        Args:
            store: Where to keep what is synced.
            limit: Bytes that a file may have; 0 is no limit.
        """

        def set_limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        command = [sys.executable, __file__, "child", str(store or ""), str(self.slow_s)]
        if not self.slow_s and store is None:
            command = [sys.executable, "-m", "swiftgen"]
        return subprocess.Popen(
            [*command, *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=set_limit if limit else None,
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=25, help="moments for kill, a third of them for others")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--prompt-characters", type=int, default=3000)
    parser.add_argument("--preset", help="default: that of swiftgen")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--tiny", action="store_true", help="a random model of two small layers instead")
    parser.add_argument("--slow", type=float, default=0.0, metavar="S", help="added to every step")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seed", type=int, default=0, help="of the moments and of the text")
    parser.add_argument("--folder", type=Path, help="for the documents; default: a temporary one")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there are no parts {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")

    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        preset = str(tiny_preset(folder)) if options.tiny else options.preset
        setup = Setup(folder, write_options(options, preset), options.slow, random.Random(options.seed))
        say("a run that is never stopped")
        setup.whole, setup.spans_s = uninterrupted(setup)
        say(", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in setup.spans_s.items()))
        begin = time.monotonic()
        results = {part: run_part(part, setup, options.kills) for part in parts}
        manifest = read_manifest(run_folder(setup.whole))
        document = {
            "preset": manifest.preset["name"],
            "num_prompt_tokens": manifest.num_prompt_tokens,
            "num_tokens": manifest.num_tokens,
            "arithmetic": manifest.arithmetic,
        }
    is_good = not any(result["wrong"] for result in results.values())
    seconds = round(time.monotonic() - begin, 1)
    spans = {phase: round(span, 3) for phase, span in setup.spans_s.items()}
    print(
        json.dumps({"good": is_good, "parts": results, "document": document, "spans_s": spans, "s": seconds})
    )
    return 0 if is_good else 1


def write_options(options: argparse.Namespace, preset: str | None) -> list[str]:
    prompt = (SENTENCE * (1 + options.prompt_characters // len(SENTENCE)))[: options.prompt_characters]
    chosen = ["-q", "--tokens", str(options.tokens), "--seed", str(options.seed), "--raw", "--prompt", prompt]
    chosen += ["--preset", preset] if preset else []
    return [*chosen, *(part for setting in options.set for part in ("--set", setting))]


def tiny_preset(folder: Path) -> Path:
    """A preset for a random model that writes parts of characters too."""
    sys.path.append(str(Path(__file__).parents[1]))
    from support.model_files import save_model

    save_model(folder / "tiny", initializer_range=0.25, max_position_embeddings=16_384)
    file = folder / "tiny.yaml"
    model = f"model: {{source: {folder / 'tiny'}, dtype: float32, device: cpu}}\n"
    file.write_text(
        f"{model}theta: 1.1\nW: 64\nsampler: {{temperature: 0.9, min_p: 0.02}}\n", encoding="utf-8"
    )
    return file


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- processes and documents -------------------------------------------------------------------------


def end(process: subprocess.Popen[str], *codes: int) -> str:
    """Waits for a process; returns what it said on stderr."""
    _, err = process.communicate(timeout=TIMEOUT_S)
    if process.returncode not in codes:
        raise Wrong(f"exit code {process.returncode}, {' | '.join(err.strip().splitlines()[-3:])}")
    return err


def log_bytes(path: Path) -> int:
    try:
        return (run_folder(path) / TOKENS_NAME).stat().st_size
    except OSError:
        return 0


def phase_of(path: Path, num_prompt_tokens: int) -> str:
    """How far a run has come, by its files; the prompt is in the log before it is read."""
    if not run_folder(path).exists():
        return "loading"
    return "prefill" if log_bytes(path) <= TOKEN_BYTES * num_prompt_tokens else "decoding"


def uninterrupted(setup: Setup) -> tuple[Path, dict[str, float]]:
    """The document that was never stopped, and the time of each phase.

    The first run fills the caches: kernels are built, the passes measured. The second is timed.
    """
    first, second = setup.new_document(), setup.new_document()
    end(setup.write(first), 0)
    num_prompt_tokens = read_manifest(run_folder(first)).num_prompt_tokens
    spans_s = dict.fromkeys(PHASES, 0.0)
    process, last_s = setup.write(second), time.monotonic()
    while process.poll() is None:
        phase, now_s = phase_of(second, num_prompt_tokens), time.monotonic()
        spans_s[phase] += now_s - last_s
        last_s = now_s
        time.sleep(POLL_S)
    end(process, 0)
    compare(second, first)
    return first, spans_s


def compare(path: Path, whole: Path) -> None:
    """Raises Wrong unless two documents have the same bytes and the first is complete."""
    log, whole_log = ((run_folder(p) / TOKENS_NAME).read_bytes() for p in (path, whole))
    if log != whole_log:
        raise Wrong(f"the token log is another from byte {first_difference(log, whole_log):,} on")
    if path.read_bytes() != whole.read_bytes():
        raise Wrong(
            f"the text is another from byte {first_difference(path.read_bytes(), whole.read_bytes()):,} on"
        )
    manifest = read_manifest(run_folder(path))
    if manifest.stop_reason != read_manifest(run_folder(whole)).stop_reason:
        raise Wrong(f"the run ended with {manifest.stop_reason}")


def first_difference(one: bytes, other: bytes) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def check_remains(path: Path, whole: Path) -> int:
    """Checks that what a stop left is the beginning of the whole; returns its tokens after the prompt."""
    if not run_folder(path).exists():
        if path.exists():
            raise Wrong("there is a text without a run folder")
        return 0
    log = (run_folder(path) / TOKENS_NAME).read_bytes()
    if not (run_folder(whole) / TOKENS_NAME).read_bytes().startswith(log):
        raise Wrong("what is left of the token log is another")
    text = path.read_bytes() if path.exists() else b""
    if not whole.read_bytes().startswith(text):
        raise Wrong("what is left of the text is another")
    text.decode("utf-8")  # whole characters only
    return len(log) // TOKEN_BYTES - read_manifest(run_folder(path)).num_prompt_tokens


def check_continued(path: Path, num_there: int) -> None:
    """Raises Wrong unless the run went on after all tokens that were there."""
    continued = read_manifest(run_folder(path)).continued
    if continued and continued[-1].num_tokens != num_there:
        raise Wrong(f"it went on after {continued[-1].num_tokens:,} tokens, {num_there:,} were there")


def signal_in(setup: Setup, process: subprocess.Popen[str], path: Path, phase: str, number: int) -> str:
    """Sends a signal at a random moment of a phase; returns the phase it was in."""
    manifest = read_manifest(run_folder(setup.whole))
    num_prompt_tokens, goal = manifest.num_prompt_tokens, 0
    if phase == "decoding":  # by tokens, since another run may be faster
        goal = TOKEN_BYTES * (num_prompt_tokens + setup.rng.randrange(1, manifest.num_tokens))
    while process.poll() is None and log_bytes(path) < goal:
        time.sleep(POLL_S)
    while process.poll() is None and PHASES.index(phase_of(path, num_prompt_tokens)) < PHASES.index(phase):
        time.sleep(POLL_S)
    span_s = setup.spans_s[phase] / (manifest.num_tokens if goal else 1)
    deadline_s = time.monotonic() + setup.rng.uniform(0, span_s)
    while process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    was_in = phase_of(path, num_prompt_tokens) if process.poll() is None else "over"
    process.send_signal(number)
    return was_in


# --- the parts ---------------------------------------------------------------------------------------


def run_part(part: str, setup: Setup, num_kills: int) -> dict[str, Any]:
    """Runs all cases of a part; a case that fails is kept as a line, not raised."""
    cases, about = CASES[part](setup, num_kills)
    facts: list[Mapping[str, Any]] = []
    wrong: list[str] = []
    for number, (name, case) in enumerate(cases, start=1):
        try:
            fact = case()
            facts.append(fact)
            outcome = " ".join(f"{key}={value}" for key, value in fact.items())
        except (Wrong, OSError, ValueError, subprocess.TimeoutExpired) as error:
            wrong.append(f"{name}: {error}")
            outcome = f"WRONG: {error}"
        say(f"{part} {number}: {name}: {outcome}")
    return {"cases": len(facts) + len(wrong), "wrong": wrong, **about, **summary(facts)}


def summary(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Words are counted; of numbers the largest and the mean."""
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for fact in facts for key in fact):
        values = [fact[key] for fact in facts if key in fact]
        if isinstance(values[0], str):
            found[key] = {value: values.count(value) for value in sorted(set(values))}
        else:
            mean = round(sum(values) / len(values), 3)
            found[key] = {"max": round(max(values), 3), "mean": mean}
    return found


Case = Callable[[], dict[str, Any]]
Cases = tuple[Iterator[tuple[str, Case]], dict[str, Any]]


def kill_cases(setup: Setup, num_kills: int) -> Cases:
    def case(phase: str) -> dict[str, Any]:
        path = setup.new_document()
        process = setup.write(path)
        was_in = signal_in(setup, process, path, phase, signal.SIGKILL)
        end(process, -signal.SIGKILL, 0)
        num_there = check_remains(path, setup.whole)
        left = [file for file in path.parent.iterdir() if file.name.startswith(".")]
        setup.resume(path)
        compare(path, setup.whole)
        check_continued(path, num_there)
        return {"killed_in": was_in, "tokens_there": num_there, "staging_left": len(left)}

    phases = (PHASES[number % len(PHASES)] for number in range(num_kills))
    return ((phase, lambda phase=phase: case(phase)) for phase in phases), {}


def term_cases(setup: Setup, num_kills: int) -> Cases:
    def case(phase: str) -> dict[str, Any]:
        path = setup.new_document()
        process = setup.write(path)
        was_in = signal_in(setup, process, path, phase, signal.SIGTERM)
        end(process, 128 + signal.SIGTERM, -signal.SIGTERM, 0)
        num_there = check_remains(path, setup.whole)
        # Before the handler is there, and after the text is whole, the system ends the process.
        is_running = was_in != "loading" and path.read_bytes() != setup.whole.read_bytes()
        if process.returncode < 0 and is_running:
            raise Wrong("SIGTERM was not handled")
        if num_there and was_in == "decoding" and read_manifest(run_folder(path)).status == "running":
            raise Wrong("run.yaml says that it still runs")
        setup.resume(path)
        compare(path, setup.whole)
        check_continued(path, num_there)
        return {"stopped_in": was_in, "tokens_there": num_there, "exit_code": str(process.returncode)}

    phases = (PHASES[number % len(PHASES)] for number in range(max(len(PHASES), num_kills // 3)))
    return ((phase, lambda phase=phase: case(phase)) for phase in phases), {}


def five_cases(setup: Setup, num_kills: int) -> Cases:
    def case() -> dict[str, Any]:
        path = setup.new_document()
        num_kills, num_there = 0, 0
        for number in range(5):
            there = run_folder(path).exists()
            process = setup.start(["resume", "-q", str(path)]) if there else setup.write(path)
            goal = (
                num_there
                + (number + 1) * (read_manifest(run_folder(setup.whole)).num_tokens - num_there) // 7
            )
            prompt_bytes = TOKEN_BYTES * read_manifest(run_folder(setup.whole)).num_prompt_tokens
            while process.poll() is None and log_bytes(path) < prompt_bytes + TOKEN_BYTES * goal:
                time.sleep(POLL_S)
            time.sleep(setup.rng.uniform(0, 0.05))
            process.kill()
            end(process, -signal.SIGKILL, 0)
            num_kills += process.returncode != 0
            before, num_there = num_there, check_remains(path, setup.whole)
            if num_there < before:
                raise Wrong(f"{before:,} tokens were there, now {num_there:,}")
        setup.resume(path)
        compare(path, setup.whole)
        return {"kills": num_kills, "tokens_there": num_there}

    return (("five kills", case) for _ in range(max(1, num_kills // 15))), {}


def log_cases(setup: Setup, num_kills: int) -> Cases:
    import swiftgen
    from swiftgen.cli.app import main as swiftgen_main

    engine: list[swiftgen.Engine] = []
    load = swiftgen.load

    def load_once(*args: Any) -> swiftgen.Engine:
        if not engine:
            engine.append(load(*args))
        return engine[0]

    def case(num_bytes: int) -> dict[str, Any]:
        path = setup.new_document()
        shutil.copy(setup.whole, path)
        shutil.copytree(run_folder(setup.whole), run_folder(path))
        os.truncate(run_folder(path) / TOKENS_NAME, log_bytes(path) - num_bytes)
        vars(swiftgen)["load"] = load_once
        try:
            code = swiftgen_main(["resume", "-q", str(path)])
        finally:
            vars(swiftgen)["load"] = load
        if code:
            raise Wrong(f"exit code {code}")
        compare(path, setup.whole)
        return {}

    lengths = range(1, 2 * TOKEN_BYTES + 1)
    return ((f"{n} bytes less", lambda n=n: case(n)) for n in lengths), {}


def full_cases(setup: Setup, num_kills: int) -> Cases:
    log_size = log_bytes(setup.whole)
    num_prompt_bytes = TOKEN_BYTES * read_manifest(run_folder(setup.whole)).num_prompt_tokens
    half = (log_size + num_prompt_bytes) // 2

    def check(path: Path, err: str) -> dict[str, Any]:
        if not any(words in err for words in ("the disk is full", "File too large")):
            raise Wrong(f"it said {err.strip()!r}")
        num_there = check_remains(path, setup.whole)
        setup.resume(path)
        compare(path, setup.whole)
        return {"tokens_there": num_there}

    def with_tmpfs() -> dict[str, Any]:
        path = setup.new_document()
        with small_disk(path.parent):
            process = setup.write(path)
            while process.poll() is None and log_bytes(path) < half:
                time.sleep(POLL_S)
            filler = path.parent / "filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            err = end(process, 1)
            filler.unlink()
            return check(path, err)

    def with_limit() -> dict[str, Any]:
        path = setup.new_document()
        if (run_folder(setup.whole) / MANIFEST_NAME).stat().st_size >= half:
            raise Wrong("the text is too short to fill a disk that takes run.yaml: more --tokens")
        return check(path, end(setup.write(path, limit=half), 1))

    can_mount = True
    probe = setup.new_document().parent
    try:
        with small_disk(probe):
            pass
    except (OSError, subprocess.CalledProcessError):
        can_mount = False
    case = with_tmpfs if can_mount else with_limit
    how = "tmpfs of 1 MB" if can_mount else "RLIMIT_FSIZE"
    return ((how, case) for _ in range(max(1, num_kills // 8))), {"by": how}


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A disk of 1 MB at a folder."""
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True, **silent)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=False, **silent)


def power_cases(setup: Setup, num_kills: int) -> Cases:
    def case(phase: str) -> dict[str, Any]:
        path, store = setup.new_document(), setup.folder / f"store{setup.num_cases}"
        store.mkdir()
        process = setup.write(path, store=store)
        was_in = signal_in(setup, process, path, phase, signal.SIGKILL)
        killed_s = time.time()
        end(process, -signal.SIGKILL, 0)
        num_there = check_remains(path, setup.whole)
        log = run_folder(path) / TOKENS_NAME
        synced = store / str(log.stat().st_ino) if log.exists() else store / "none"
        age_s = killed_s - synced.stat().st_mtime if synced.exists() else 0.0
        after = setup.new_document()
        restore(store, path.parent.stat().st_ino, after.parent)
        num_kept = check_remains(after, setup.whole) if run_folder(after).exists() else 0
        setup.resume(after)
        compare(after, setup.whole)
        is_over = was_in == "over"
        lost = {} if is_over else {"lost_tokens": num_there - num_kept, "lost_s": max(0.0, age_s)}
        return {"cut_in": was_in, "tokens_there": num_there, **lost}

    phases = ("decoding" if number % 4 else "prefill" for number in range(1, 1 + max(4, num_kills // 3)))
    return ((phase, lambda phase=phase: case(phase)) for phase in phases), {}


def restore(store: Path, folder_inode: int, target: Path) -> None:
    """What a disk has after a power cut: the names of each folder when it was last synced, and of each file
    the content when that was.
    """
    names = store / f"{folder_inode}.names"
    if not names.exists():
        return
    for name, (inode, is_folder) in json.loads(names.read_text(encoding="utf-8")).items():
        if is_folder:
            (target / name).mkdir()
            restore(store, inode, target / name)
        else:
            content = store / str(inode)
            (target / name).write_bytes(content.read_bytes() if content.exists() else b"")


CASES: dict[str, Callable[[Setup, int], Cases]] = {
    "kill": kill_cases,
    "term": term_cases,
    "five": five_cases,
    "log": log_cases,
    "full": full_cases,
    "power": power_cases,
}


# --- in the process that writes ----------------------------------------------------------------------


def keep_what_is_synced(store: Path) -> None:
    """From now on every `fsync` leaves a copy: of a file its content, of a folder its names."""
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        name, data = str(status.st_ino), b""
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(descriptor) as entries:
                names = {entry.name: (entry.inode(), entry.is_dir()) for entry in entries}
            name, data = f"{name}.names", json.dumps(names).encode()
        else:
            reader = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
            data = os.pread(reader, status.st_size, 0)
            os.close(reader)
        (store / "new").write_bytes(data)
        os.replace(store / "new", store / name)

    os.fsync = watched


def child(store: str, slow_s: float, args: list[str]) -> int:
    """The command line, with slower steps and copies of what is synced."""
    import swiftgen.engine
    from swiftgen.cli.app import main as swiftgen_main

    if store:
        keep_what_is_synced(Path(store))
    decode = swiftgen.engine.decode

    def slowly(*args: Any, **options: Any) -> Iterator[Any]:
        for event in decode(*args, **options):
            time.sleep(slow_s)
            yield event

    if slow_s:
        swiftgen.engine.decode = slowly  # type: ignore[attr-defined]
    return swiftgen_main(args)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        sys.exit(child(sys.argv[2], float(sys.argv[3]), sys.argv[4:]))
    sys.exit(main())
