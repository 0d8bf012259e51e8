"""Baidu's framework (arXiv 2201.05500, 2003.05622): what the files of results say of its claims."""

from __future__ import annotations

import statistics

from benchmarks.cluster import model
from benchmarks.papers.evidence import BUSY, H200, TWO_CORES, Evidence, Verdict, find, gpu, mean, ms_of, rows_of


def _kstep_ratios(rate: str) -> dict[str, float]:
    rows = find("cluster", way="k-step", gbit=rate)
    return {f"{row['nodes']} x {row['local']}": ms_of(row, "sharded") / float(row["ms_p50"]) for row in rows}


def _kstep_time(rate: str, bar: float) -> Evidence:
    ratios = _kstep_ratios(rate)
    text = ", ".join(f"{shape}: {ratio:.1f}x" for shape, ratio in ratios.items())
    met = [ratio >= bar for ratio in ratios.values()]
    verdict: Verdict = "reproduced" if all(met) else "shape reproduced" if any(met) else "not reproduced"
    return Evidence(f"a step with k = 16 at {rate} Gbit/s, nodes x ranks: {text}", TWO_CORES + ", virtual nodes", verdict,
                    f"bar {bar:g}x; all ranks share the two cores")  # fmt: skip


def kstep_time_slow() -> Evidence:
    return _kstep_time("0.1", 3.0)


def kstep_time_fast() -> Evidence:
    return _kstep_time("1", 1.5)


def kstep_auc() -> Evidence:
    changes = {}
    for log in ("criteo", "frappe", "demo"):
        changes[log] = mean("kstep_train", "auc", log=log, k="16") - mean("kstep_train", "auc", log=log, k="1")
    text = ", ".join(f"{log} {change:+.5f}" for log, change in changes.items())
    holds = all(abs(change) <= 0.0005 for change in changes.values())
    return Evidence(
        f"AUC of k = 16 less k = 1, 3 seeds, 4 ranks: {text}", BUSY, "reproduced" if holds else "not reproduced"
    )


def kstep_auc_by_k() -> Evidence:
    base = mean("kstep_auc", "auc", data="criteo", rule="synchronous")
    found = [(k, mean("kstep_auc", "auc", data="criteo", rule="frozen_v", k=k) - base) for k in ("4", "16", "64")]
    text = ", ".join(f"k = {k}: {change:+.5f}" for k, change in found)
    return Evidence(f"Criteo 60k, less synchronous: {text}", BUSY, "reproduced" if all(abs(c) < 0.001 for _, c in found)
                    else "not reproduced")  # fmt: skip


def kstep_without_scaling() -> Evidence:
    base = mean("kstep_auc", "auc", data="criteo", rule="synchronous")
    lost = mean("kstep_auc", "auc", data="criteo", rule="params", k="16", scale_lr="0") - base
    text = f"k = 16 with the learning rate of k = 1: {lost:+.4f} AUC"
    return Evidence(text, BUSY, "not reproduced", "merging alone loses; scaling the rate by sqrt(ranks) wins it back")


def kstep_bytes() -> Evidence:
    base = mean("kstep_auc", "dense_bytes_per_step", data="criteo", rule="synchronous")
    found = [(k, base / mean("kstep_auc", "dense_bytes_per_step", data="criteo", rule="params", k=k, scale_lr="1"))
             for k in ("4", "16", "64")]  # fmt: skip
    text = ", ".join(f"k = {k}: 1 / {ratio:.0f}" for k, ratio in found)
    return Evidence(f"dense bytes of a step, weights alone: {text}", BUSY, "reproduced")


def kstep_overlap() -> Evidence:
    times = [mean("kstep_time", "ms_per_step", wire="slow", rule="params", k="16", overlap=flag) for flag in ("1", "0")]
    text = f"k = 16 over a slow wire: {times[0]:.0f} ms overlapped, {times[1]:.0f} waiting"
    return Evidence(text, BUSY, "shape reproduced" if times[0] < times[1] else "not reproduced")


def two_hops_time() -> Evidence:
    rows = [row for row in rows_of("cluster") if row["way"] == "one hop" and row["gbit"] in ("0.1", "1")]
    ratios = [float(row["ms_p50"]) / ms_of(row, "sharded") for row in rows]
    text = f"one hop over two hops, 0.1 and 1 Gbit/s: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return Evidence(
        text, TWO_CORES + ", virtual nodes", "reproduced" if statistics.median(ratios) > 1 else "not reproduced"
    )


def across_nodes() -> Evidence:
    row = find("wire", trace="criteo", nodes="2")[0]
    share = 2 * float(row["across"]) / (int(row["plain"]) * 4 / 3)  # of plain's bytes a half goes to the other node
    text = f"2 x 2 ranks, Criteo: {float(row['across']) / 1e3:,.0f} kB across nodes, {share:.2f} of every lookup"
    return Evidence(text, TWO_CORES + ", 4 ranks", "reproduced" if share < 0.5 else "not reproduced")


def sixteen_bits() -> Evidence:
    narrow = find("wire", trace="criteo", traffic="bf16")[0]
    wide = find("wire", trace="criteo", order="shuffled", nodes="1", traffic="fp32", batch_per_rank="1024")[0]
    share = float(narrow["in_node"]) / float(wide["in_node"])
    return Evidence(
        f"rows and gradients in bf16: {share:.2f} of the bytes", TWO_CORES + ", 4 ranks", "shape reproduced"
    )


def weak_scaling() -> Evidence:
    steps = [(row["nodes"], float(row["ms_p50"])) for row in rows_of("cluster")
             if row["local"] == "1" and row["way"] == "k-step" and row["gbit"] == "1"]  # fmt: skip
    text = ", ".join(f"{nodes} nodes: {ms:.0f} ms" for nodes, ms in steps)
    return Evidence(f"k = 16, 1 Gbit/s, one rank a node: {text}", TWO_CORES + ", virtual nodes", "not reproducible here",
                    "all nodes share two cores")  # fmt: skip


def scaling_model() -> Evidence:
    points = model.read_measured()
    constants = model.fit([point for point in points if point.is_fitted])
    errors = [abs(model.error_of(point, constants)) for point in points if not point.is_fitted]
    near = sum(error <= model.NEAR for error in errors)
    text = f"held-out steps: median error {statistics.median(errors):.0%}, {near} of {len(errors)} within 20 %"
    return Evidence(text.replace("% ", " % ").replace("%,", " %,").replace("  ", " "), TWO_CORES + ", virtual nodes",
                    "reproduced" if near == len(errors) else "shape reproduced")  # fmt: skip


def ssd_reads() -> Evidence:
    rows = rows_of("cpu_2_cores_ssd")
    text = ", ".join(
        f"{row['what']} {float(row['ratio']):.2f}x {row['peer']}" for row in rows if row["record_bytes"] == "144"
    )
    return Evidence(f"records of 144 bytes: {text}", TWO_CORES, "reproduced")


def ssd_step() -> Evidence:
    rows = [row for row in rows_of("h200_bars_written") if row["memory"] == "0.1"]
    base = gpu("hotbed-cached", benchmark="embedding_step", dim="64", memory="", ranks="0")
    slow = float(rows[0]["ms_p50"])
    text = f"a tenth of the rows in memory, the rest on ssd: {slow:.1f} ms a step, all in memory {base:.2f}"
    stall = float(rows[0]["stall_share"])
    return Evidence(text, H200, "not reproduced", f"the step waits for rows {100 * stall:.0f} % of the time")


def end_to_end() -> Evidence:
    row = find("end_to_end", passed="True")[0]
    text = (f"{int(row['rows']) / 1e6:.0f} million samples, 1.5 % cached, killed once: AUC {float(row['auc']):.3f}, "
            f"{float(row['train_peak_mb']) / 1e3:.1f} GB of memory, {float(row['disk_gb']):.0f} GB of disk")  # fmt: skip
    return Evidence(text, TWO_CORES, "shape reproduced")


def many_ids() -> Evidence:
    row = find("sketch", benchmark="sketch")[0]
    text = f"{int(row['ids']) / 1e9:.0f} billion ids counted in 64 MiB, distinct ids off by {abs(float(row['off_percent']))} %"
    return Evidence(text, TWO_CORES, "shape reproduced", "10^11 ids have not been trained")


def id_index() -> Evidence:
    row = next(row for row in rows_of("ids_cpu_2_cores") if row["system"] == "hotbed Translator")
    text = f"{int(row['ids']) / 1e6:.0f} million ids: {row['find_m_per_s']} million found/s, {row['bytes_per_id']} bytes each"
    return Evidence(text, TWO_CORES, "shape reproduced")


def served_updates() -> Evidence:
    rows = [row for row in rows_of("serve") if row["map"] == "False"]
    failed, updates = (sum(int(float(row[name])) for row in rows) for name in ("valid_failed", "updates"))
    without = sum(row["valid_failed"] == "0" for row in rows)
    text = f"{updates} newer checkpoints under load; {failed} valid requests fail in {len(rows) - without} of {len(rows)} runs"
    return Evidence(text, TWO_CORES, "shape reproduced", "one rank, preset ids; not for dynamic ids, ssd or many ranks")
