"""Two towers on users followed by lists of items, and the same model in plain PyTorch.

    python examples/two_tower.py gowalla_train.txt.xz gowalla_test.txt.xz --out items.parquet
    python examples/two_tower.py gowalla_train.txt.xz gowalla_test.txt.xz --twin

A line is `user item item ...`. It prints recall@20 and NDCG@20 on the test file, without the items of train, after every epoch;
--cache keeps that share of the rows on the device, with the same result to the bit. --negatives 4 compares each pair with four
items that the user does not have (BPR) instead of the other items of the batch.
"""

import argparse
import lzma
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

import hotbed
from hotbed.retrieval import NegativeSampler, TwoTower, log_frequency, ranking_at_k, write_item_vectors


def read(path: str) -> dict[int, list[int]]:
    """User -> items."""
    content = Path(path).read_bytes()
    lines = (lzma.decompress(content) if path.endswith(".xz") else content).decode().splitlines()
    numbers = [[int(one) for one in line.split()] for line in lines if line.strip()]
    return {one[0]: one[1:] for one in numbers}


def tables_of(num_users: int, num_items: int, options: argparse.Namespace) -> dict[str, hotbed.Table]:
    init = hotbed.Normal(0.1)
    features = ("item", *(f"negative{n}" for n in range(options.negatives)))
    return {
        "user": hotbed.Table(num_users, options.dim, init=init),
        "item": hotbed.Table(num_items, options.dim, init=init, features=features),
    }


class HotbedRows:
    """The vectors of users and items in hotbed's tables; rows move in backward."""

    def __init__(self, num_users: int, num_items: int, options: argparse.Namespace) -> None:
        tables = tables_of(num_users, num_items, options)
        optimizer = hotbed.optim.Adagrad(lr=options.lr)
        self.tables = hotbed.EmbeddingTables(tables, optimizer, cache=options.cache, seed=options.seed)

    def ahead(self, batches: list[torch.Tensor]) -> Iterable[torch.Tensor]:
        return hotbed.prefetch(batches, self.tables)

    def vectors(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tables(ids)

    def step(self) -> None:
        """Nothing: rows moved in backward."""

    def whole(self, side: str) -> torch.Tensor:
        return self.tables.weight(side)


class TorchRows:
    """The twin: nn.Embedding with sparse gradients and torch's Adagrad, from the same first values."""

    def __init__(self, num_users: int, num_items: int, options: argparse.Namespace) -> None:
        first = hotbed.EmbeddingTables(tables_of(num_users, num_items, options), seed=options.seed)
        sides = {
            side: nn.Embedding.from_pretrained(first.weight(side).clone(), freeze=False, sparse=True)
            for side in ("user", "item")
        }
        self.sides = nn.ModuleDict(sides)
        self.optimizer = torch.optim.Adagrad(self.sides.parameters(), lr=options.lr)

    def ahead(self, batches: list[torch.Tensor]) -> Iterable[torch.Tensor]:
        return batches

    def vectors(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.sides["user"](ids[:, :1]), self.sides["item"](ids[:, 1:])], dim=1)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self, side: str) -> torch.Tensor:
        return self.sides[side].weight.detach()


def train(options: argparse.Namespace) -> float:
    """The recall@20 of the last epoch."""
    train_items, test_items = read(options.train), read(options.test)
    num_users = 1 + max([*train_items, *test_items])
    num_items = 1 + max(item for lists in (train_items, test_items) for items in lists.values() for item in items)
    pairs = torch.tensor([(user, item) for user, items in train_items.items() for item in items])
    log_q = log_frequency(torch.bincount(pairs[:, 1], minlength=num_items)) if options.log_q else torch.zeros(num_items)
    wanting = sorted(user for user in test_items if test_items[user])
    rows = (TorchRows if options.twin else HotbedRows)(num_users, num_items, options)
    model = TwoTower(options.dim, options.dim, temperature=options.temperature)
    sampler = NegativeSampler(pairs, num_items)
    recall = 0.0
    for epoch in range(options.epochs):
        generator = torch.Generator().manual_seed(options.seed + epoch)
        order = torch.randperm(len(pairs), generator=generator)
        negatives = sampler.draw(pairs[order, 0], options.negatives, generator)
        ids, total = torch.cat([pairs[order], negatives], dim=1), 0.0
        for batch in rows.ahead([some.contiguous() for some in ids.split(options.batch)]):
            users, items, *others = rows.vectors(batch).unbind(1)
            if others:
                loss = model.bpr_loss(users, items, torch.stack(others, dim=1))
            else:
                loss = model.loss(users, items, batch[:, 1], log_q[batch[:, 1]])
            loss.backward()
            rows.step()
            total += float(loss.detach()) * len(batch)
        with torch.no_grad():
            item_vectors = model.items(rows.whole("item"))
            user_vectors = model.users(rows.whole("user")[wanting])
            seen = [train_items.get(user, []) for user in wanting]
            recall, ndcg = ranking_at_k(user_vectors, item_vectors, [test_items[user] for user in wanting], seen)
        print(
            f"epoch {epoch + 1}: loss {total / len(pairs):.4f}, recall@20 {recall:.4f}, NDCG@20 {ndcg:.4f}", flush=True
        )
    if options.out:
        write_item_vectors(options.out, torch.arange(num_items), item_vectors)
        print(f"{num_items:,} item vectors in {options.out}")
    return recall


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train")
    parser.add_argument("test")
    parser.add_argument("--twin", action="store_true", help="nn.Embedding instead of hotbed's tables")
    parser.add_argument("--no-log-q", dest="log_q", action="store_false", help="leave the correction out")
    parser.add_argument(
        "--negatives",
        type=int,
        default=0,
        help="train with the BPR loss, against this number of items that the user does not have",
    )
    parser.add_argument("--cache", type=float, help="share of the rows on the device")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--temperature", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="item vectors as Parquet")
    return train(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
