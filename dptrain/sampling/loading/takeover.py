"""What can be taken over from a user's dataset and data loader, and what has to be refused."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from dptrain.sampling.scheme import Scheme


def check_length(dataset: Any, scheme: Scheme) -> None:
    """Refuse a dataset without length, or of another length than the scheme was made for.

    Raises:
        ValueError: with the remedy; no example is read.
    """
    no_length = (
        f"dataset is of type {type(dataset).__name__}, a dataset without length: a scheme has to "
        "know how many examples there are; use a map-style dataset"
    )
    if isinstance(dataset, IterableDataset):
        raise ValueError(no_length)
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise ValueError(no_length) from error
    if length != scheme.dataset_size:
        raise ValueError(
            f"the dataset has {length} examples but the scheme was made for "
            f"dataset_size={scheme.dataset_size}; make the scheme with dataset_size={length}"
        )


def check_sampler(data_loader: DataLoader) -> None:
    """Refuse a data loader that does more than go through all rows, in order or shuffled.

    Raises:
        ValueError: if it does not batch, or has its own batch sampler or sampler.
    """
    remedy = "pass a DataLoader(dataset, collate_fn=…) if the scheme is to draw from all rows"
    if data_loader.batch_size is None:
        if data_loader.batch_sampler is not None:
            raise ValueError(
                f"the data loader's batch sampler ({type(data_loader.batch_sampler).__name__}) "
                f"draws batches in its own way, which no accountant covers; {remedy}"
            )
        raise ValueError(
            "the data loader has batch_size=None, so its collate function does not make batches; "
            "give it a batch size"
        )
    # SubsetRandomSampler, say, would leave rows out that the scheme would then train on.
    if type(data_loader.sampler) not in (RandomSampler, SequentialSampler):
        raise ValueError(
            f"the data loader's sampler ({type(data_loader.sampler).__name__}) chooses rows in its "
            f"own way, which the scheme would replace; {remedy}, or a Subset of the dataset"
        )


def fetching_options(data_loader: DataLoader) -> dict[str, Any]:
    """How a data loader fetches: its collate function, workers and pinning."""
    names = (
        "collate_fn",
        "num_workers",
        "pin_memory",
        "persistent_workers",
        "prefetch_factor",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
    )
    return {name: getattr(data_loader, name) for name in names}
