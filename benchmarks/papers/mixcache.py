"""ScaleFreeCTR and its MixCache (arXiv 2104.08542): what the files of results say of their claims."""

from __future__ import annotations

import statistics

from benchmarks.papers.evidence import H200, TWO_CORES, Evidence, Verdict, find, gpu, mean, ms_of, rows_of


def duplicates_removed() -> Evidence:
    shares = {row["batch_per_rank"]: float(row["share_of_plain"])
              for row in find("wire", trace="criteo", order="shuffled", nodes="1", traffic="fp32")}  # fmt: skip
    text = ", ".join(f"batch {int(batch):,}: {share:.2f}" for batch, share in shares.items())
    verdict: Verdict = "reproduced" if max(shares.values()) < 0.5 else "not reproduced"
    return Evidence(f"bytes sent, of one vector per lookup, Criteo: {text}", TWO_CORES + ", 4 ranks", verdict)


def duplicates_of_a_flat_log() -> Evidence:
    row = find("wire", trace="gowalla", order="shuffled")[0]
    text = f"Gowalla, shuffled: {float(row['share_of_plain']):.2f} of plain"
    return Evidence(
        text, TWO_CORES + ", 4 ranks", "not reproduced", "two features of mostly rare ids: little to remove"
    )


def long_bags() -> Evidence:
    row = find("wire", trace="zipf bags", bag="100", way="chosen", nodes="1")[0]
    text = f"bags of 100: {float(row['share_of_plain']):.3f} of plain, {float(row['share_of_pooled']):.2f} of pooled vectors"
    return Evidence(text, TWO_CORES + ", 4 ranks", "reproduced")


def published_collective_bytes() -> Evidence:
    rows = rows_of("modes")
    shares = [float(row["published_over_sharded"]) for row in rows]
    ours = [float(row["replicated_over_sharded"]) for row in rows]
    text = (f"as published {min(shares):.1f} to {max(shares):.1f} times the bytes of distinct rows to and from owners; "
            f"our replicas {min(ours):.1f} to {max(ours):.1f}")  # fmt: skip
    return Evidence(
        text, TWO_CORES + ", 4 ranks", "not reproduced", "run as published; requests for distinct rows send less"
    )


def replicas_time() -> Evidence:
    ratios = [float(row["ms_p50"]) / ms_of(row, "sharded") for row in rows_of("cluster") if row["way"] == "replicated"]
    text = f"wall time of a step over sharded: {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
    return Evidence(text, TWO_CORES + ", virtual nodes", "not reproduced" if statistics.median(ratios) > 1 else "reproduced",
                    "our replicas, updated by owners")  # fmt: skip


def pipeline_hides() -> Evidence:
    stall = gpu("hotbed-cached", "stall_share")
    rows = [
        row for row in rows_of("h200_bars") if row["system"] == "hotbed-cached" and row["benchmark"] == "training_step"
    ]
    largest = max(float(row["stall_share"]) for row in rows if row["stall_share"])
    text = f"the GPU waits for rows {stall:.1%} of a training step; at most {largest:.1%} in {len(rows)} earlier runs"
    return Evidence(text.replace("%", " %"), H200, "reproduced" if stall < 0.05 else "not reproduced")


def pipeline_limit() -> Evidence:
    stall = gpu("hotbed-cached", "stall_share", "embedding_step")
    text = f"without a dense part the GPU waits {stall:.0%} of the step".replace("%", " %")
    return Evidence(text, H200, "shape reproduced", "nothing to hide behind: the host is the limit")


def host_tables() -> Evidence:
    ratio = gpu("hotbed-cached") / gpu("hotbed-hbm")
    text = f"{ratio:.1f} times the step with all rows on the GPU; theirs {236 / 27:.1f} times"
    return Evidence(text, H200, "reproduced" if ratio < 236 / 27 else "not reproduced")


def two_ranks() -> Evidence:
    one, two = (mean("ranks", "samples_per_s", ranks=number) for number in ("1", "2"))
    text = f"2 ranks: {two:,.0f} samples/s, {two / one:.2f} times one"
    return Evidence(
        text, TWO_CORES, "shape reproduced" if two > 1.5 * one else "not reproduced", "one core a rank, not GPUs"
    )


def same_auc_as_others() -> Evidence:
    ours, theirs = (statistics.median(float(row["mean_best_auc"]) for row in rows_of("peers_2_cores")
                                      if row["setting"] == "criteo-deepfm" and row["system"] == name)
                    for name in ("hotbed", "fuxictr"))  # fmt: skip
    text = f"DeepFM on Criteo 60k: {ours:.4f}, FuxiCTR {theirs:.4f}"
    return Evidence(text, TWO_CORES, "reproduced" if ours > theirs - 0.002 else "not reproduced")


def faster_than_others() -> Evidence:
    found = [float(row["hotbed_is_faster_by"]) for row in rows_of("peers_2_cores")
             if row["system"] == "fuxictr" and row["setting"] == "criteo-deepfm"]  # fmt: skip
    text = f"time to an AUC, DeepFM on Criteo 60k: {statistics.median(found):.1f} times as fast as FuxiCTR"
    return Evidence(text, TWO_CORES, "shape reproduced", "other systems than in the paper")
