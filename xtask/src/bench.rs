//! Benchmarks: each prints its table and writes a result file to `docs/results`.

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
    /// The node agent at rest: memory, CPU time, calls to the API server.
    Agent,
    /// Placement of GPUs: quality against brute force and what is usual, time at 10,000 nodes.
    Placement,
    /// Plan and preflight of a job on 128 nodes.
    Preflight,
    /// `switchyard doctor` on logs of 1 GiB.
    Doctor,
    /// From apply to the verdict about the fabric in the status of a gang of 16.
    Verdict,
    /// On real nodes: from apply to the first step, from a killed rank to the next, memory of what is installed.
    Cluster,
    /// On four real nodes in two racks: the same jobs where we put them, where kube-scheduler does, and in any order.
    Worth,
    /// On real nodes: what 20 random jobs and faults leave behind.
    Leftovers,
    /// Matrix products and the model's step, by kernel.
    Kernels,
    /// Training steps of GPT, BERT, ResNet-18 and MLP beside PyTorch's.
    Engine,
}

/// Measures and writes the result file.
pub(crate) fn bench(what: What) -> Result<()> {
    let folder = root().join("docs/results");
    std::fs::create_dir_all(&folder)?;
    let (name, bench) = match what {
        What::Build => return crate::bench_build::bench(&folder.join("build.json")),
        What::Step => ("step", "step"),
        What::AllReduce => ("all-reduce", "all_reduce"),
        What::Controller => ("controller", "controller"),
        What::Agent => ("agent", "agent"),
        What::Placement => ("placement", "placement"),
        What::Preflight => ("preflight", "preflight"),
        What::Doctor => ("doctor", "doctor"),
        What::Verdict => ("verdict", "verdict"),
        What::Cluster => return crate::steps::bench_cluster(&folder, "times"),
        What::Worth => return crate::steps::bench_cluster(&folder, "worth"),
        What::Leftovers => return crate::steps::bench_cluster(&folder, "leftovers"),
        What::Kernels => ("kernels", "kernels"),
        What::Engine => ("engine", "engine"),
    };
    let file = folder.join(format!("{name}.json"));
    let file = file.to_string_lossy().into_owned();
    if matches!(what, What::Step | What::Controller | What::Verdict) {
        step("both programs in release mode", &mut crate::steps::build())?;
    }
    let mut command = cargo(&["bench", "--workspace", "--bench", bench, "--", "--json", &file]);
    if matches!(what, What::Engine) {
        command.arg("--python").arg(crate::wheels::TORCH.python()?);
    }
    step(name, &mut command)
}
