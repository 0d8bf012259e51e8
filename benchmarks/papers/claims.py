"""The registry: every claim with what the paper shows, its number and hardware, what it corresponds to here, and our evidence.

Numbers of the papers are those of their abstracts, tables and code, as far as we could read them; where we only know the
direction, the claim says so. Ours come from benchmarks/results through the functions of cache.py, mixcache.py and framework.py.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.papers import cache, framework, mixcache
from benchmarks.papers.evidence import Checked, Missing, Source

CACHE, MIXCACHE, BAIDU = "2208.05321", "2104.08542", "2201.05500"
PAPERS = {
    CACHE: "A frequency-aware software cache (arXiv 2208.05321)",
    MIXCACHE: "ScaleFreeCTR and its MixCache (arXiv 2104.08542)",
    BAIDU: "Baidu's framework and its hierarchical parameter server (arXiv 2201.05500, 2003.05622)",
}
A100 = "one A100 80 GB"


class Claim(NamedTuple):
    """One thing that a paper shows."""

    key: str
    paper: str
    shows: str
    theirs: str  # number and hardware
    here: str  # what it corresponds to
    command: str
    evidence: Source
    quick: str = ""  # name of a check in quick.py


_GPU = "needs a GPU; no row in benchmarks/results"
BARS = "python -m benchmarks.gpu_bars"
WIRE, CLUSTER, KSTEP = "python -m benchmarks.wire", "python -m benchmarks.cluster", "python -m benchmarks.kstep auc"
TRAIN = "python -m benchmarks.kstep_train"
PLAN, SSD = "python -m benchmarks.plan", "python -m benchmarks.ssd"

CLAIMS = (
    Claim("small-cache", CACHE, "a cache of 1.5 % of the rows trains at a decent speed", f"1.5 %; {A100}",
          "training step with an MLP, row-wise Adagrad, batch 16,384", BARS, cache.small_cache_trains, "shares_over_time"),
    Claim("kaggle-speed", CACHE, "Criteo Kaggle, 1 % cached, against all rows on the GPU", f"50 of 81 steps/s, 0.62; {A100}",
          "the same shape from files, 1.5 % cached", "python -m benchmarks.from_files", cache.small_cache_from_files),
    Claim("terabyte-speed", CACHE, "Criteo 1TB, 1 % cached, against all rows on the GPU", f"42 of 45 steps/s; {A100}",
          "Criteo 1TB's shape on one GPU", BARS, Missing("not measured", _GPU)),
    Claim("avazu-speed", CACHE, "Avazu, 1 % cached, against all rows on the GPU", f"72 of 111 steps/s; {A100}",
          "Avazu's whole log is not here", BARS, Missing("not measured", "only its first hour is here; " + _GPU)),
    Claim("device-memory", CACHE, "device memory with a cache of 1 %", f"3.75 GB instead of 66.5 GB; {A100}",
          "device memory at 1.5 %", BARS, cache.device_memory, "metadata_follows_the_cache"),
    Claim("metadata", CACHE, "what the device holds besides rows", "76 % of 3.75 GB is index, growing with the table",
          "metadata grows with the cache", BARS, cache.memory_by_dim, "metadata_follows_the_cache"),
    Claim("auc-first", CACHE, "AUC with the cache and without, first log", f"0.7913 with, 0.7952 without; {A100}",
          "losses with any cache are those of whole tables to the bit (law 1)", "python -m pytest tests/laws",
          Checked("difference 0: equal to the bit", "better than published"),
          "cache_is_invisible"),
    Claim("auc-second", CACHE, "AUC with the cache and without, second log", f"0.7768 with, 0.7867 without; {A100}",
          "the same law", "python -m pytest tests/laws",
          Checked("difference 0: equal to the bit", "better than published"),
          "cache_is_invisible"),
    Claim("hit-rate", CACHE, "hit rate over the share cached", "rises with the share; direction only",
          "share of lookups that hit", PLAN, cache.hit_rates, "hits_by_share"),
    Claim("steady-hits", CACHE, "a small cache answers most lookups", "direction only",
          "1.5 % cached, every row written before", BARS, cache.hit_rate_of_steady_state, "hits_by_share"),
    Claim("frequency-known", CACHE, "frequencies of the data tell what a cache will do", "they fill and order the cache",
          "hit rates forecast from the data before a run", PLAN, cache.forecast_of_hits),
    Claim("policy", CACHE, "a policy by frequency misses less than LRU", "direction only",
          "misses of every policy", "python -m benchmarks.policies",
          Checked("oracle 14,555 misses, LFU 18,614, LRU 22,120 in the workload of --quick", "real logs in decision 3"),
          "policies"),
    Claim("warm-up", CACHE, "filling the cache by frequency before the first step", "direction only",
          "tables.warmup=SHARE, for every policy", "python -m benchmarks.papers --quick",
          Checked("first 30 batches: LRU 5,348 misses instead of 5,872, LFU with counts 4,139 instead of 5,446",
                  "off by default: rows that were never written are not copied, so a cold start is cheap"), "warm_up"),
    Claim("share-sweep", CACHE, "throughput over the share cached, 0.1 % to 100 %", f"a figure; {A100}",
          "the same sweep", BARS, Missing("not measured", _GPU), "shares_over_time"),
    Claim("stateful", CACHE, "optimizers with state (their code ties it to slots)", "SGD alone is right",
          "Adam, 1.5 % cached", BARS, cache.adam_cached, "cache_is_invisible"),
    Claim("other-caches", CACHE, "against FBGEMM's cache over unified memory", "direction only",
          "bags, 5 % cached", BARS, cache.against_another_cache),
    Claim("planning", CACHE, "finding misses and victims costs a part of the step", "direction only",
          "planning on a CPU", "python -m benchmarks.cache_step", cache.planning_cost),
    Claim("bounded-buffer", CACHE, "transfers go through a buffer of a given size", "a setting",
          "tables.staging; without it buffers follow the largest window", "python -m pytest tests/laws",
          Checked("rows on their way stay within tables.staging at every step", "counted on a CPU over memory and ssd")),
    Claim("many-gpus", CACHE, "the cache together with hybrid parallel training", "up to several A100",
          "sharded tables, each rank with its cache", CLUSTER, Missing("not reproducible here", "one GPU")),
    Claim("virtual-ids", MIXCACHE, "removing duplicate ids cuts what moves", "direction only",
          "bytes of distinct rows, of one vector per lookup", WIRE, mixcache.duplicates_removed, "duplicates"),
    Claim("virtual-ids-flat", MIXCACHE, "the same where few ids repeat", "not shown",
          "Gowalla: users and items", WIRE, mixcache.duplicates_of_a_flat_log),
    Claim("virtual-ids-bags", MIXCACHE, "duplicates in features with many ids", "not shown",
          "bags of 100 ids, by rows or in parts", WIRE, mixcache.long_bags),
    Claim("virtual-ids-time", MIXCACHE, "training time with and without virtual ids", "a figure; GPU servers",
          "no mode sends duplicates", WIRE, Missing("not measured", "only bytes were counted")),
    Claim("union-bytes", MIXCACHE, "the union of a batch is replicated and its gradients summed by dense collectives",
          "the published design", "bytes against distinct rows to and from owners", "python -m benchmarks.modes",
          mixcache.published_collective_bytes, "union_bytes"),
    Claim("union-time", MIXCACHE, "replicas at every rank speed up training", "direction only; GPU servers",
          "replicated over sharded rows", CLUSTER, mixcache.replicas_time),
    Claim("pipeline", MIXCACHE, "a pipeline of reader, host and GPU hides the host", "a figure; GPU servers",
          "time that the GPU waits for rows, with a dense part", BARS, mixcache.pipeline_hides),
    Claim("pipeline-limit", MIXCACHE, "where the pipeline has nothing to hide behind", "not shown",
          "the embedding step alone", BARS, mixcache.pipeline_limit),
    Claim("host-tables", MIXCACHE, "tables in host memory, working rows on the GPU: MindSpore's version of it",
          "236 ms a step, 27 ms data-parallel", "1.5 % cached over all rows on the GPU", BARS, mixcache.host_tables),
    Claim("more-workers", MIXCACHE, "throughput over the number of workers", "a figure; several GPU servers",
          "two ranks on two cores", "python -m benchmarks.ranks", mixcache.two_ranks),
    Claim("same-auc", MIXCACHE, "the AUC of other systems", "no loss", "against FuxiCTR",
          "python -m benchmarks.peers", mixcache.same_auc_as_others),
    Claim("faster", MIXCACHE, "faster than other systems to train", "direction only", "time to an AUC, against FuxiCTR",
          "python -m benchmarks.peers", mixcache.faster_than_others),
    Claim("kstep-auc", BAIDU, "k-step Adam loses essentially no accuracy", "no loss; Baidu's ads log, GPU nodes",
          "AUC through `hotbed train` with its defaults", TRAIN, framework.kstep_auc, "kstep_auc"),
    Claim("kstep-auc-by-k", BAIDU, "accuracy over k", "a figure; the same", "k = 4, 16, 64", KSTEP, framework.kstep_auc_by_k),
    Claim("kstep-plain", BAIDU, "k-step merging without changing the rate", "no loss", "the same learning rate", KSTEP,
          framework.kstep_without_scaling),
    Claim("kstep-diverges", BAIDU, "local Adam may diverge without a shared second moment (Chen, Li, Li, 2020)",
          "an example and a proof", "one weight, three ranks", "python -m pytest tests/distributed/test_kstep.py",
          Checked("from 2, with the minimum at 0: local Adam ends above 5, the default within 0.05", "bounds of the test"),
          "local_adam_diverges"),
    Claim("kstep-bytes", BAIDU, "dense traffic falls with k", "1 / k", "bytes of a step", KSTEP, framework.kstep_bytes,
          "kstep_bytes"),
    Claim("kstep-slow", BAIDU, "k-step cuts training time between nodes", "a figure; GPU nodes",
          "virtual nodes at 0.1 Gbit/s", CLUSTER, framework.kstep_time_slow, "kstep_time"),
    Claim("kstep-fast", BAIDU, "the same on a faster network", "a figure; GPU nodes",
          "virtual nodes at 1 Gbit/s", CLUSTER, framework.kstep_time_fast),
    Claim("kstep-overlap", BAIDU, "merges overlap with computation", "part of the design", "over a slow wire",
          "python -m benchmarks.kstep time", framework.kstep_overlap),
    Claim("two-hops", BAIDU, "routes that follow the topology are faster", "a figure; NVLink and InfiniBand",
          "two hops against one, virtual nodes", CLUSTER, framework.two_hops_time),
    Claim("across", BAIDU, "less traffic between nodes than inside", "part of the design", "two nodes of two ranks", WIRE,
          framework.across_nodes),
    Claim("narrow", BAIDU, "narrower numbers on the wire", "not shown", "16-bit traffic", WIRE, framework.sixteen_bits),
    Claim("scaling", BAIDU, "training time over nodes", "near linear; GPU nodes", "virtual nodes", CLUSTER,
          framework.weak_scaling),
    Claim("scaling-model", BAIDU, "(ours) a model predicts steps of nodes that were not measured", "not shown",
          "held-out points of the virtual cluster", "python -m benchmarks.cluster.model", framework.scaling_model),
    Claim("hierarchy", BAIDU, "GPU, memory and SSD together hold the table", "10 TB; 4 GPU nodes", "three tiers, same bits",
          "python -m pytest tests/laws", Checked("equal to the bit with three tiers", "at laptop size"), "three_tiers"),
    Claim("ssd-store", BAIDU, "append-only files on SSD keep up with the disk", "direction only", "against dd and fio", SSD,
          framework.ssd_reads, "three_tiers"),
    Claim("ssd-step", BAIDU, "the SSD is a stage of the pipeline and hidden", "direction only",
          "a tenth of the rows in memory", BARS, framework.ssd_step),
    Claim("beyond-memory", BAIDU, "training from a table larger than memory", "10 TB; 4 GPU nodes",
          "80 million samples on a small machine", "python -m benchmarks.end_to_end", framework.end_to_end, "three_tiers"),
    Claim("many-ids", BAIDU, "10^11 sparse features", "10^11", "ids counted in a fixed budget", "python -m benchmarks.sketch",
          framework.many_ids, "wide_ids"),
    Claim("id-index", BAIDU, "ids of any value find their rows", "part of the design", "the index of dynamic ids",
          "python -m benchmarks.ids", framework.id_index, "wide_ids"),
    Claim("against-cpus", BAIDU, "4 GPU nodes against 150 CPU nodes", "more than 2x; 4 nodes of 8 GPUs", "", CLUSTER,
          Missing("not reproducible here", "no such cluster")),
    Claim("price", BAIDU, "price for performance against a CPU cluster", "4 to 9 times better", "", CLUSTER,
          Missing("not reproducible here", "no such cluster")),
    Claim("publish", BAIDU, "trained models are published while training continues", "part of the system",
          "newer checkpoints under load", "python -m benchmarks.serve", framework.served_updates),
)  # fmt: skip
