"""Measure networks before their first step, by layer, beside what theory predicts: python scripts/probe.py KEY=VALUE ..."""

import argparse
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import open_dict
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from tqdm import tqdm

import train
from conf.check import check, check_hydra
from conf.explain import explain, own_words
from conf.help import CONF
from conf.recipes import settle
from conf.schema import AXES
from data.tokens import Tokens
from data.windows import Windows
from model.sizes import Sizes
from stability.probe import Probe, notes, table, write
from stability.probe_report import draw
from stability.theory import predict
from stability.trace import Trace, trace
from stability.verdict import REFUSED
from training import device as machine
from training.memory import execution

DESCRIPTION = """\
Measure networks at their initialisation, by layer, beside what theory predicts. Nothing is trained: one forward and
backward pass over the windows of step 1 of the training run of the same words, with its seed, its batch, its loss.
Prints a table and leaves probe.png and probe.json.
"""
EPILOG = """configurations:
  KEY=VALUE are the words of train.py (`python train.py --help`). `vs` stands between two configurations. Words before a
  colon that stands alone belong to all of them:

  python scripts/probe.py norm=layernorm placement=post
  python scripts/probe.py placement=pre vs placement=post vs recipe=deepnorm
  python scripts/probe.py model=deep model.depth=100 : placement=pre vs placement=post vs recipe=deepnorm
  python scripts/probe.py model=deep placement=pre : model.depth=12 vs model.depth=24 vs model.depth=48
  python scripts/probe.py model=deep model.depth=1000 batch=4

duration:
  One CPU thread, unless threads=N says otherwise (wide models gain from more). 100 layers of width 64 take 2 to 4 s a
  seed; 1,000 layers 10 s and 3 GB with batch=4 (256 tokens), 30 s and 8 GB with the default batch=16. What autograd
  keeps goes with batch / accumulate * model.context: lower batch or model.context, or raise accumulate, which changes
  no number.
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="probe.py", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="overrides, as train.py's; vs and : part them")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seed, seed + 1, ... (default 3 of them)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to (default: runs/probe-TIME)")
    asked = parser.parse_intermixed_args(arguments)
    try:
        return probe(asked.words, asked.seeds, asked.out)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        line = explain(error).replace("add -m (--multirun) to sweep over them", "put vs between configurations")
    except OSError as error:
        line = f"{error.filename or ''}: {error.strerror}; --out names another place"
    print(f"probe.py: {line}", file=sys.stderr)
    return REFUSED


def probe(words: Sequence[str], seeds: int, out: Path | None) -> int:
    """Check all, then measure all. ValueError, one line, for what the user can mend."""
    if seeds < 1:
        raise ValueError(f"--seeds must be >= 1, found {seeds}")
    checked = [Checked(overrides) for overrides in configurations(words)]
    directory = out or Path("runs") / f"probe-{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(3)}"
    directory.mkdir(parents=True, exist_ok=True)
    with tqdm(
        total=seeds * len(checked), unit="network", disable=None, leave=False
    ) as bar:  # None: on a terminal alone
        probes = [one.measure(seeds, bar) for one in checked]
    write(probes, directory / "probe.json")
    draw(probes, directory / "probe.png")
    # in a file or a pipe nothing needs to be folded
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 40 + 40 * len(probes))
    console.print(table(probes))
    for line in [*notes(probes), f"{directory / 'probe.png'}", f"{directory / 'probe.json'}"]:
        console.print(line, soft_wrap=True)
    return 0


def configurations(words: Sequence[str]) -> list[list[str]]:
    """The overrides of each configuration: `common : one vs another`, the common ones first, so that its own win."""
    parts: list[list[str]] = [[]]
    common: list[str] | None = None
    for word in words:
        if word == ":":
            if common is not None or len(parts) > 1:
                raise ValueError("one colon, before the first vs, parts the common words from the configurations")
            common, parts = parts[0], [[]]
        elif word == "vs":
            parts.append([])
        else:
            parts[-1].append(word)
    if (len(parts) > 1 or common is not None) and not all(parts):
        raise ValueError("vs and : need a configuration on both sides, as in `placement=pre vs placement=post`")
    return [[*(common or []), *part] for part in parts]


class Checked:
    """A configuration that train.py would run: its text, windows and choices, known before anything is measured."""

    def __init__(self, words: list[str]) -> None:
        check_hydra(words)
        for word in words:
            if word.lstrip("+~").partition("=")[0].split(".")[0] in ("hydra", "resume"):
                raise ValueError(f"{word}: a probe starts no run; --out names where it writes")
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            cfg = compose("config", words, return_hydra_config=True)
        chosen = dict(cfg.hydra.runtime.choices)
        with open_dict(cfg):
            del cfg["hydra"]
        for note in settle(cfg, chosen, words):
            print(note)
        self.words, self.plain = words, check(cfg)
        try:
            self.choices, _, corpus = train.check_whole(self.plain, {axis: chosen.get(axis, "") for axis in AXES})
        except HydraException as error:
            raise ValueError(own_words(error)) from None
        self.device = machine.accelerator()
        self.precision = machine.precision(self.plain["precision"], self.device)
        self.tokens: Tokens
        self.windows: Windows
        self.tokens, self.windows = train.text_of(self.plain, corpus)

    def measure(self, seeds: int, bar: "tqdm[Any]") -> Probe:
        first: int = self.plain["seed"]
        traces = []
        for seed in range(first, first + seeds):
            traces.append(self.trace(seed))
            bar.update()
        sizes = Sizes(**{key: value for key, value in self.plain["model"].items() if not key.startswith("_")})
        predicted = predict(self.choices, sizes)
        return Probe(self.words, self.plain, self.tokens.vocab, list(range(first, first + seeds)), traces, predicted)

    def trace(self, seed: int) -> Trace:
        """What step 1 of the training run with this seed would be: the same matrices, windows and draws."""
        plain, windows = self.plain | {"seed": seed}, self.windows.seeded(seed)
        torch.set_num_threads(plain["threads"] or 1)  # a second one would be idle or in the way in most that is probed
        torch.manual_seed(seed)  # dropout's draws, as in train.py
        model = train.network(plain, self.choices, self.tokens.vocab)
        model.settle(windows.first_step())
        alone = plain | {"compile": False, "devices": 1, "num_nodes": 1}
        model.execution, _ = execution(model, alone, rows=windows.rows, device=self.device)
        model.to(self.device)
        if self.precision == "64-true":
            model.double()
        batches = [windows[item].to(self.device) for item in range(windows.accumulate)]
        return trace(model, batches, autocast=self.precision == "bf16-mixed")


if __name__ == "__main__":
    sys.exit(main())
