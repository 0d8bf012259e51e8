"""Well-known public click and rating logs: their addresses, checksums and licences.

Data only; download.py fetches the files. Checksums are those of the publishers: MovieLens publishes one per file, Criteo's
Kaggle archive has one in the records of its mirrors, Hugging Face in the listing that is read at download time. An entry
without a checksum has none published.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta

from hotbed.errors import ConfigError

HUB = "https://huggingface.co"
CRITEO_DAYS = 24
CRITEO_FIRST_DAY = date(2015, 2, 15)


@dataclass(frozen=True)
class RemoteFile:
    """One file to fetch."""

    name: str
    address: str
    size: int | None = None  # bytes, where published
    checksum: str = ""  # "md5:..." or "sha256:..."; empty where none is published


@dataclass(frozen=True)
class HubFolder:
    """A folder of a Hugging Face dataset; its listing names files, sizes and SHA-256 sums."""

    repository: str
    path: str = ""
    place: str = ""  # the local folder its files go to

    @property
    def page(self) -> str:
        return f"{HUB}/datasets/{self.repository}"

    @property
    def listing(self) -> str:
        return f"{HUB}/api/datasets/{self.repository}/tree/main/{self.path}".rstrip("/") + "?recursive=true"

    def address(self, path: str) -> str:
        return f"{self.page}/resolve/main/{path}"


@dataclass(frozen=True)
class PublicSet:
    """A public dataset."""

    name: str
    summary: str
    page: str  # the publisher's own page
    licence: str
    files: tuple[RemoteFile, ...] = ()
    folders: tuple[HubFolder, ...] = ()
    suffixes: tuple[str, ...] = ()  # of the files wanted from the folders
    by_day: bool = False  # folders are days, chosen with --day
    by_hand: tuple[str, ...] = ()  # steps, where the source needs an account
    then: tuple[str, ...] = ()  # commands that turn it into a dataset directory


def _movielens(size: str, ratings: str, num_bytes: int, md5: str, then: tuple[str, ...]) -> PublicSet:
    file = f"ml-{size}.zip"
    return PublicSet(
        name=f"movielens-{size}",
        summary=f"MovieLens {size.upper()}: {ratings} ratings of films",
        page=f"https://grouplens.org/datasets/movielens/{size}/",
        licence="GroupLens terms of use: research, with citation (Harper and Konstan 2015); no redistribution, no revenue",
        files=(RemoteFile(file, f"https://files.grouplens.org/datasets/movielens/{file}", num_bytes, f"md5:{md5}"),),
        then=(f"unzip {file}", *then),
    )


RATED_WELL = (
    "add a column label (1 where rating is above 3) to ratings, as CSV with a header",
    "hotbed prepare ratings.csv --out movielens --ids userId,movieId --drop rating,timestamp "
    "--splits train=0.8,valid=0.1,test=0.1",
)
CATALOG: tuple[PublicSet, ...] = (
    PublicSet(
        name="criteo-kaggle",
        summary="Criteo Kaggle display-advertising challenge: 45.8 M clicks and non-clicks of 7 days",
        page="https://ailab.criteo.com/ressources/",
        licence="Criteo's terms of use: non-commercial research; treat as CC BY-NC-SA 4.0",
        files=(
            RemoteFile(
                "criteo-research-kaggle-display-advertising-challenge-dataset.tar.gz",
                "https://go.criteo.net/criteo-research-kaggle-display-advertising-challenge-dataset.tar.gz",
                4_576_820_670,
                "md5:df9b1b3766d9ff91d5ca3eb3d23bed27",
            ),
        ),
        then=(
            "tar xzf criteo-research-kaggle-display-advertising-challenge-dataset.tar.gz",
            "hotbed prepare train.txt --format criteo --splits train=0.8,valid=0.1,test=0.1 --out criteo",
        ),
    ),
    PublicSet(
        name="criteo-1tb",
        summary="Criteo 1TB click logs: 24 days, about 12 GB each, fetched one by one (--day 0 .. 23)",
        page="https://ailab.criteo.com/download-criteo-1tb-click-logs-dataset",
        licence="CC BY-NC-SA 4.0",
        folders=tuple(
            HubFolder("criteo/CriteoClickLogs", f"data/day={CRITEO_FIRST_DAY + timedelta(days=day)}", f"day_{day}")
            for day in range(CRITEO_DAYS)
        ),
        suffixes=(".parquet",),
        by_day=True,
        then=("hotbed prepare train=day_0 test=day_23 --format parquet --out criteo-1tb",),
    ),
    PublicSet(
        name="avazu",
        summary="Avazu click-through-rate prediction: 40.4 M mobile ad impressions of 11 days",
        page="https://www.kaggle.com/c/avazu-ctr-prediction/data",
        licence="Kaggle competition rules: competition and non-commercial research use",
        by_hand=(
            "make a Kaggle account and accept the rules at https://www.kaggle.com/c/avazu-ctr-prediction/rules",
            "download train.gz from https://www.kaggle.com/c/avazu-ctr-prediction/data (or with Kaggle's own command: "
            "kaggle competitions download -c avazu-ctr-prediction)",
        ),
        then=(
            "hotbed prepare train.gz --format csv --label click --ids '*' --drop id "
            "--splits train=0.8,valid=0.1,test=0.1 --out avazu",
        ),
    ),
    _movielens("1m", "1 million", 5_917_549, "c4d9eecfca2ab87c1945afe126590906", RATED_WELL),
    _movielens("20m", "20 million", 198_702_078, "cd245b17a1ae2cc31bb14903e1204af3", RATED_WELL),
    _movielens("25m", "25 million", 261_978_986, "6b51fb2759a8657d3bfcbfc42b592ada", RATED_WELL),
    PublicSet(
        name="frappe",
        summary="Frappe_x1: 288,609 app uses in context, the BARS benchmark's split",
        page="https://github.com/reczoo/Datasets/tree/main/Frappe/Frappe_x1",
        licence="research only, no redistribution (L. Baltrunas et al. 2015)",
        folders=(HubFolder("reczoo/Frappe_x1"),),
        suffixes=(".zip",),
        then=(
            "unzip Frappe_x1.zip",
            "hotbed prepare train=train.csv valid=valid.csv test=test.csv --format csv --ids '*' --out frappe",
        ),
    ),
)


def find_public_set(name: str) -> PublicSet:
    """The entry of that name."""
    for entry in CATALOG:
        if entry.name == name:
            return entry
    known = ", ".join(entry.name for entry in CATALOG)
    raise ConfigError(f"{name!r} is not in the catalog. Known sets: {known}. Embedded ones need no download.")


def choose_folders(entry: PublicSet, days: tuple[int, ...]) -> tuple[HubFolder, ...]:
    """The folders to fetch; a dataset published by day is never fetched completely by accident."""
    if not entry.by_day:
        if days:
            raise ConfigError(f"--day is for datasets published by day; {entry.name} is not.")
        return entry.folders
    wrong = [day for day in days if not 0 <= day < len(entry.folders)]
    if wrong or not days:
        given = ", ".join(map(str, wrong)) or "none"
        raise ConfigError(
            f"{entry.name} is published by day: choose days of 0 .. {len(entry.folders) - 1} with --day (given: {given})."
        )
    return tuple(entry.folders[day] for day in dict.fromkeys(days))
