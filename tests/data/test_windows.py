"""Which window is seen when."""

import itertools

import numpy as np
import pytest
import torch

from data.tokenizer import Bpe
from data.windows import Windows, train_loader, val_loader, validation_windows

TOKENS = np.arange(1003, dtype=np.uint16)  # a token is its place, so that a window shows where it starts


def windows(**knobs) -> Windows:
    return Windows(TOKENS, **({"context": 10, "batch": 12, "accumulate": 1, "steps": 20, "seed": 0} | knobs))


def step(s: int, world: int = 1, **knobs) -> list[int]:
    """Where the windows of step s start, over all micro-batches and ranks in order."""
    ranks = [windows(world=world, rank=rank, **knobs) for rank in range(world)]
    k = ranks[0].accumulate
    return [start for item in range((s - 1) * k, s * k) for rank in ranks for start in rank.starts(item).tolist()]


@pytest.mark.case("L01")
def test_an_item_is_a_micro_batch_of_consecutive_tokens():
    item = windows(accumulate=3)[5]
    assert item.dtype == torch.int64
    assert item.shape == (4, 11)
    assert (item - item[:, :1] == torch.arange(11)).all()
    assert len(windows(accumulate=3)) == 60
    for outside in (-1, 60):
        with pytest.raises(IndexError):
            windows(accumulate=3)[outside]


def test_the_windows_of_all_ranks_are_those_of_each_and_an_epoch_is_drawn_once(monkeypatch):
    shares = [windows(world=3, rank=rank) for rank in range(3)]
    expected = [[share[item] for share in shares] for item in range(20)]
    drawn: list[tuple[int, int]] = []
    draw = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: drawn.append(seed) or draw(seed))
    one = windows(world=3, rank=2)
    for item, parts in enumerate(expected):
        assert all(torch.equal(a, b) for a, b in zip(one.of_all_ranks(item), parts, strict=True))
    assert drawn == sorted(set(drawn))


@pytest.mark.case("T04", "G08")
@pytest.mark.parametrize("accumulate, world", [(2, 1), (1, 3), (3, 2), (12, 1)])
def test_a_step_sees_the_same_windows_however_it_is_split(accumulate: int, world: int):
    for s in (1, 7, 9, 20):
        assert step(s, world, accumulate=accumulate) == step(s)


@pytest.mark.case("R01")
def test_a_step_is_a_function_of_the_seed_and_itself():
    run = windows()
    backwards = {i: run[i].tolist() for i in reversed(range(20))}
    assert all(windows(steps=i + 1)[i].tolist() == backwards[i] for i in range(20))
    assert step(1, seed=1) != step(1)
    with pytest.raises(ValueError, match="seed"):
        windows(seed=-1)


def test_each_epoch_predicts_each_token_at_most_once():
    run = windows(batch=11, steps=27)
    per_epoch = run.windows_per_epoch
    assert per_epoch == 99
    starts = np.concatenate([run.starts(i) for i in range(len(run))]).reshape(3, per_epoch)
    for epoch in starts:
        assert (np.diff(np.sort(epoch)) == 10).all(), "end to end, each once"
        assert epoch.min() < 10
        assert epoch.max() + 10 < len(TOKENS)
        assert (np.diff(epoch) != 10).any(), "shuffled"
    assert len({epoch.min() for epoch in starts}) > 1, "the phases differ"
    assert not (np.argsort(starts[0]) == np.argsort(starts[1])).all(), "the orders differ"


@pytest.mark.parametrize("size", [11, 12, 20, 21, 31])
def test_a_corpus_of_a_window_or_three_is_enough(size: int):
    run = Windows(TOKENS[:size], context=10, batch=4, accumulate=1, steps=50, seed=0)
    seen = {start for i in range(50) for start in run.starts(i).tolist()}
    assert min(seen) >= 0
    assert max(seen) + 11 <= size
    with pytest.raises(ValueError, match=r"model\.context=10: 10 tokens found, 11 needed"):
        Windows(TOKENS[:10], context=10, batch=4, accumulate=1, steps=50, seed=0)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"batch=12.*accumulate.*5 \* 1; use batch=15"):
        windows(accumulate=5)
    with pytest.raises(ValueError, match="batch=12"):
        windows(accumulate=3, world=8)
    with pytest.raises(ValueError, match="accumulate=0"):
        windows(accumulate=0)


@pytest.mark.case("R01 Lightning-AI/pytorch-lightning#19764", "R02")
def test_the_loader_gives_the_run_in_order_from_any_item():
    run = windows(accumulate=2)
    items = [run[i].tolist() for i in range(len(run))]
    assert [b.tolist() for b in train_loader(run)] == items
    assert [b.tolist() for b in train_loader(run, start=7, workers=2)] == items[7:]


@pytest.mark.case("D05 huggingface/transformers#5486, allenai/allennlp#5128")
def test_a_worker_forked_after_training_a_tokenizer_is_quiet(monkeypatch, capfd):
    # set and deleted, so that what the code under test leaves in the environment is undone
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    bpe = Bpe(300)
    bpe.fit(["trained in this process on all cores"] * 50)
    list(bpe.encode_all(["and used"] * 50))
    assert len(list(train_loader(windows(), workers=2))) == 20
    assert "forked" not in capfd.readouterr().err


def test_validation_is_spread_and_fixed():
    chosen = validation_windows(TOKENS, 10, 7)
    assert chosen.shape == (7, 11)
    starts = chosen[:, 0].tolist()
    assert starts == sorted(set(starts))
    assert all(b - a >= 10 for a, b in itertools.pairwise(starts))
    assert starts[0] == 0
    assert starts[-1] > 800
    assert (chosen == validation_windows(TOKENS, 10, 7)).all()
    assert validation_windows(TOKENS, 10, 1000).shape == (100, 11)
    assert [len(b) for b in val_loader(chosen, batch=3)] == [3, 3, 1]
    assert (torch.cat(list(val_loader(chosen, batch=3))) == chosen).all()
    with pytest.raises(ValueError, match=r"model\.context=10"):
        validation_windows(TOKENS[:10], 10, 7)
