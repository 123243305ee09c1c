//! Benchmarks: each prints its table and writes a result file to `docs/results`.

use crate::images::SHIPPED;
use crate::workspace::{built_in, cargo, root, step};
use anyhow::Result;
use clap::ValueEnum;

/// What to measure.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Benchmark {
    /// Developer wait times: from a fresh clone to the first training step, test builds, rebuilds
    /// after one changed line.
    Build,
    /// Milliseconds per step by part, for one and two processes.
    Step,
    /// All-reduce between two local ranks, by size.
    AllReduce,
    /// The controller with 1,000 workers and 1,000 jobs on a real API server, compared with
    /// training-operator.
    Controller,
    /// The controller in a cluster of 10,000 nodes with 100,000 pods, with a gang of 4,096 nodes
    /// and a day of 500 queued jobs.
    ClusterSize,
    /// The idle node agent: memory, CPU time, API server calls.
    Agent,
    /// GPU placement: quality against brute force and common heuristics, time at 10,000 nodes.
    Placement,
    /// The queue on traces of production clusters, compared with rules like those of other
    /// schedulers: completion and wait times. Takes hours.
    Queue,
    /// Plan and preflight of a job on 128 nodes.
    Preflight,
    /// `switchyard doctor` on logs of 1 GiB.
    Doctor,
    /// 200 gangs in the queues of a real Kueue: partial admissions, evictions, charged GPUs. Also
    /// scenes of its topology-aware scheduling.
    Kueue,
    /// From `kubectl apply` to the fabric verdict in the status, for a gang of 16.
    Verdict,
    /// On real nodes: from apply to the first step, from a killed rank to the next step, memory of
    /// the installed components.
    Cluster,
    /// On four real nodes in two racks: the same jobs with our placement, kube-scheduler's, and
    /// random placement.
    Worth,
    /// Interference with pods and nodes by others: seconds until a job runs or its status names the
    /// cause.
    Scenes,
    /// On real nodes: leftovers of 20 random jobs and faults.
    Leftovers,
    /// On two real nodes: ten jobs that the queue policy preempts, and their weights.
    Preemption,
    /// Matrix products and the model's step, by kernel.
    Kernels,
    /// Training steps of GPT, BERT, ResNet-18 and MLP, compared with PyTorch.
    Engine,
    /// The same in f32, with at most AVX2 on both sides.
    EngineAvx2,
    /// All-reduce, a model of 250 MB and parameter servers on emulated networks of 1 and 10 Gbit/s,
    /// compared with PyTorch over gloo and Open MPI; losses of the remedies for a slow network.
    /// Needs root.
    Network,
}

impl Benchmark {
    /// Its name and the program that measures it; `None` if it takes more than one program.
    pub(crate) fn bench(self) -> Option<(&'static str, &'static str)> {
        Some(match self {
            Benchmark::Build
            | Benchmark::Cluster
            | Benchmark::Worth
            | Benchmark::Scenes
            | Benchmark::Leftovers
            | Benchmark::Preemption => return None,
            Benchmark::Step => ("step", "step"),
            Benchmark::AllReduce => ("all-reduce", "all_reduce"),
            Benchmark::Controller => ("controller", "controller"),
            Benchmark::ClusterSize => ("cluster-size", "cluster_size"),
            Benchmark::Agent => ("agent", "agent"),
            Benchmark::Placement => ("placement", "placement"),
            Benchmark::Queue => ("queue", "queue"),
            Benchmark::Preflight => ("preflight", "preflight"),
            Benchmark::Doctor => ("doctor", "doctor"),
            Benchmark::Kueue => ("kueue", "kueue"),
            Benchmark::Verdict => ("verdict", "verdict"),
            Benchmark::Kernels => ("kernels", "kernels"),
            Benchmark::Engine => ("engine", "engine"),
            Benchmark::EngineAvx2 => ("engine-avx2", "engine"),
            Benchmark::Network => ("network", "network"),
        })
    }

    /// Whether a figure at this path of the result is used to compare two commits: it must be ours,
    /// and not one of many from the same run.
    pub(crate) fn is_compared(self, path: &str) -> bool {
        match self {
            Benchmark::Placement => path.ends_with("/p50Microseconds"),
            Benchmark::Controller => path.starts_with("/switchyard/"),
            Benchmark::Step => path.contains("Process") && path.ends_with("/stepMs"),
            Benchmark::Engine | Benchmark::EngineAvx2 => {
                path.ends_with("/ours/milliseconds") || path.ends_with("/ours/cpuMilliseconds")
            }
            _ => !path.starts_with("/machine"),
        }
    }
}

/// Measures and writes the result file.
pub(crate) fn bench(what: Benchmark) -> Result<()> {
    let folder = root().join("docs/results");
    std::fs::create_dir_all(&folder)?;
    let Some((name, bench)) = what.bench() else {
        return match what {
            Benchmark::Build => crate::bench_build::bench(&folder.join("build.json")),
            Benchmark::Cluster => crate::steps::bench_cluster(&folder, "times"),
            Benchmark::Worth => crate::steps::bench_cluster(&folder, "worth"),
            Benchmark::Scenes => crate::steps::bench_scenes(&folder.join("scenes.json")),
            Benchmark::Leftovers => crate::steps::bench_cluster(&folder, "leftovers"),
            _ => crate::steps::bench_cluster(&folder, "preemption"),
        };
    };
    let file = folder.join(format!("{name}.json"));
    let file = file.to_string_lossy().into_owned();
    if matches!(
        what,
        Benchmark::Step | Benchmark::Controller | Benchmark::ClusterSize | Benchmark::Verdict | Benchmark::Network
    ) {
        // Select packages as the tests' library does. Selected by package they would get other
        // features, and the library would rebuild them.
        let programs = ["--workspace", "--bin", "switchyard", "--bin", "switchyard-worker"];
        step("both programs", cargo(&["build", "--profile", SHIPPED]).args(programs))?;
    }
    // Measure the shipped profile; its link-time optimisation takes minutes. The Kueue benchmark
    // compares no times.
    let profile = if matches!(what, Benchmark::Kueue) { "dev" } else { SHIPPED };
    let mut command = cargo(&["bench", "--profile", profile, "--workspace", "--bench", bench, "--", "--json", &file]);
    if matches!(what, Benchmark::Engine | Benchmark::EngineAvx2) {
        command.arg("--python").arg(crate::wheels::TORCH.python()?);
    }
    if matches!(what, Benchmark::Network) {
        crate::data::data(crate::data::DataSet::Digits)?;
        command.arg("--programs").arg(built_in(SHIPPED)).arg("--python").arg(crate::wheels::TORCH.python()?);
        command.arg("--mpi").arg(crate::wheels::MPI.python()?);
    }
    if matches!(what, Benchmark::EngineAvx2) {
        // Without AVX-512, PyTorch has no fast bf16 products: one GPT step takes 3.6 s, 17 times as
        // long as ours.
        command.args(["--avx2", "--precision", "f32"]);
    }
    step(name, &mut command)
}
