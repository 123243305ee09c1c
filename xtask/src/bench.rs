//! Benchmarks: each prints its table and writes a result file to `docs/results`.

use crate::images::SHIPPED;
use crate::workspace::{cargo, root, step};
use anyhow::Result;
use clap::ValueEnum;

/// What to measure.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum What {
    /// How long a developer waits: a fresh clone to the first training step, builds of the tests, one changed line.
    Build,
    /// ms per step with its parts, one and two processes.
    Step,
    /// All-reduce between two local ranks, by size.
    AllReduce,
    /// The controller with 1,000 workers and 1,000 jobs on a real API server, beside training-operator.
    Controller,
    /// The controller in a cluster of 10,000 nodes with 100,000 pods, a gang of 4,096 nodes, and a day of 500 jobs that wait.
    ClusterSize,
    /// The node agent at rest: memory, CPU time, calls to the API server.
    Agent,
    /// Placement of GPUs: quality against brute force and what is usual, time at 10,000 nodes.
    Placement,
    /// The queue on a trace of a production cluster, beside rules like those of others: completion and waiting times. Takes hours.
    Queue,
    /// Plan and preflight of a job on 128 nodes.
    Preflight,
    /// `switchyard doctor` on logs of 1 GiB.
    Doctor,
    /// 200 gangs in the queues of a real Kueue: partial admissions, evictions, what is charged. Scenes of its topology-aware scheduling.
    Kueue,
    /// From apply to the verdict about the fabric in the status of a gang of 16.
    Verdict,
    /// On real nodes: from apply to the first step, from a killed rank to the next, memory of what is installed.
    Cluster,
    /// On four real nodes in two racks: the same jobs where we put them, where kube-scheduler does, and in any order.
    Worth,
    /// What others do to pods and nodes of a cluster: seconds until a job runs, or its status names the cause.
    Scenes,
    /// On real nodes: what 20 random jobs and faults leave behind.
    Leftovers,
    /// Matrix products and the model's step, by kernel.
    Kernels,
    /// Training steps of GPT, BERT, ResNet-18 and MLP beside PyTorch's.
    Engine,
    /// The same in f32, with AVX2 at most on both sides.
    EngineAvx2,
}

impl What {
    /// Its name, and the program that measures it; `None` for what is more than a program.
    pub(crate) fn bench(self) -> Option<(&'static str, &'static str)> {
        Some(match self {
            What::Build | What::Cluster | What::Worth | What::Scenes | What::Leftovers => return None,
            What::Step => ("step", "step"),
            What::AllReduce => ("all-reduce", "all_reduce"),
            What::Controller => ("controller", "controller"),
            What::ClusterSize => ("cluster-size", "cluster_size"),
            What::Agent => ("agent", "agent"),
            What::Placement => ("placement", "placement"),
            What::Queue => ("queue", "queue"),
            What::Preflight => ("preflight", "preflight"),
            What::Doctor => ("doctor", "doctor"),
            What::Kueue => ("kueue", "kueue"),
            What::Verdict => ("verdict", "verdict"),
            What::Kernels => ("kernels", "kernels"),
            What::Engine => ("engine", "engine"),
            What::EngineAvx2 => ("engine-avx2", "engine"),
        })
    }

    /// Whether a figure of its result is one by which two commits are compared: of ours, and not one of many from the same run.
    pub(crate) fn is_compared(self, path: &str) -> bool {
        match self {
            What::Placement => path.ends_with("/p50Microseconds"),
            What::Controller => path.starts_with("/switchyard/"),
            What::Step => path.contains("Process") && path.ends_with("/stepMs"),
            What::Engine | What::EngineAvx2 => {
                path.ends_with("/ours/milliseconds") || path.ends_with("/ours/cpuMilliseconds")
            }
            _ => !path.starts_with("/machine"),
        }
    }
}

/// Measures and writes the result file.
pub(crate) fn bench(what: What) -> Result<()> {
    let folder = root().join("docs/results");
    std::fs::create_dir_all(&folder)?;
    let Some((name, bench)) = what.bench() else {
        return match what {
            What::Build => crate::bench_build::bench(&folder.join("build.json")),
            What::Cluster => crate::steps::bench_cluster(&folder, "times"),
            What::Worth => crate::steps::bench_cluster(&folder, "worth"),
            What::Scenes => crate::steps::bench_scenes(&folder.join("scenes.json")),
            _ => crate::steps::bench_cluster(&folder, "leftovers"),
        };
    };
    let file = folder.join(format!("{name}.json"));
    let file = file.to_string_lossy().into_owned();
    if matches!(what, What::Step | What::Controller | What::ClusterSize | What::Verdict) {
        // As the tests' library builds them, or it would do so again: by package they have other features of their libraries.
        let programs = ["--workspace", "--bin", "switchyard", "--bin", "switchyard-worker"];
        step("both programs", cargo(&["build", "--profile", SHIPPED]).args(programs))?;
    }
    // What is measured is what is shipped; its link-time optimisation takes minutes. With Kueue, no time is compared.
    let profile = if matches!(what, What::Kueue) { "dev" } else { SHIPPED };
    let mut command = cargo(&["bench", "--profile", profile, "--workspace", "--bench", bench, "--", "--json", &file]);
    if matches!(what, What::Engine | What::EngineAvx2) {
        command.arg("--python").arg(crate::wheels::TORCH.python()?);
    }
    if matches!(what, What::EngineAvx2) {
        // In bf16 PyTorch has no fast products without AVX-512: one step of GPT takes 3.6 s, 17 times as long as ours.
        command.args(["--avx2", "--precision", "f32"]);
    }
    step(name, &mut command)
}
