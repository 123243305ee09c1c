//! The stages of `cargo xtask test`, with their content and time budgets.

use crate::setup::Prerequisite;

/// A stage of the tests.
#[derive(Debug)]
pub(crate) struct Stage {
    pub name: &'static str,
    pub what: &'static str,
    /// Seconds; more than twice as many fail the run. For `pure`, `fuzz`, `report` and `chart`:
    /// twice the time measured under load. For the others: an estimate for two busy cores, until
    /// the result files have a run under load.
    pub budget: u64,
    pub lane: Lane,
    /// What must be installed or built beforehand.
    pub prerequisites: &'static [Prerequisite],
    pub work: Work,
}

/// Stages of a lane run one after another. The lanes run in parallel, and an idle lane takes stages
/// from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    /// CPU-bound tests. They yield to the other lanes.
    Compute,
    /// Tests that mostly wait for an API server.
    Wait,
    /// Tests on real nodes, which mostly wait for pauses between restarts. No other lane takes
    /// them, because they count leftovers on the machine.
    Nodes,
}

impl Lane {
    pub const ALL: [Lane; 3] = [Lane::Compute, Lane::Wait, Lane::Nodes];
}

#[derive(Debug)]
pub(crate) enum Work {
    /// Formatting, clippy and licences, before anything else is built.
    Lint,
    /// Documentation tests and links.
    Documentation,
    /// Test programs.
    Tests { of: Tests, threads: Option<u32>, environment: &'static [(&'static str, &'static str)] },
}

/// A selection of tests.
#[derive(Debug)]
pub(crate) enum Tests {
    /// All tests of every package except these and `switchyard-tests`, and the tests of the program
    /// `rules`.
    AllExcept(&'static [&'static str]),
    /// All tests of these packages.
    Packages(&'static [&'static str]),
    /// The tests whose names contain this word in two programs of the worker, which run
    /// concurrently.
    Concurrent([&'static str; 2], &'static str),
    /// Modules of a `switchyard-tests` program, one process after another because they share static
    /// state.
    Modules(&'static str, &'static [&'static str]),
}

const ENGINE: &[&str] = &[
    "switchyard-worker",
    "switchyard-checkpoint",
    "switchyard-example-custom-model",
    "switchyard-gpu-probe",
    "switchyard-cuda",
    "switchyard-cuda-reference",
    "switchyard-cuda-libraries",
];

/// Modules that need third-party frameworks: `cargo xtask test --frameworks`.
pub(crate) const FRAMEWORKS: &str = "frameworks";

const CONTROL_PLANE: Prerequisite = Prerequisite::Programs(&["etcd", "kubernetes"]);
const CHART: Prerequisite = Prerequisite::Programs(&["helm", "prometheus-operator", "promtool", "kubeflow-trainer"]);

/// All stages, in the order in which each lane runs them.
pub(crate) const STAGES: [Stage; 15] = [
    Stage {
        name: "lint",
        what: "formatting, clippy, licences of dependencies",
        budget: 600,
        lane: Lane::Compute,
        prerequisites: &[],
        work: Work::Lint,
    },
    Stage {
        name: "pure",
        what: "crates whose tests need only the compiler, node agent, generated files, repository rules",
        budget: 600,
        lane: Lane::Compute,
        prerequisites: &[],
        work: Work::Tests { of: Tests::AllExcept(ENGINE), threads: None, environment: &[] },
    },
    Stage {
        name: "engine",
        what: "engine, collectives, readers, checkpoints, accuracy, GPU kernels without a GPU, GPU probe",
        budget: 1200,
        lane: Lane::Compute,
        prerequisites: &[Prerequisite::Digits, Prerequisite::Cuda],
        work: Work::Tests { of: Tests::Packages(ENGINE), threads: None, environment: &[] },
    },
    Stage {
        name: "fuzz",
        what: "fuzzers of every file format, a minute each, side by side",
        budget: 180,
        lane: Lane::Compute,
        prerequisites: &[],
        // Run all at the same time regardless of the number of cores, because each runs for this
        // long.
        work: Work::Tests {
            of: Tests::Concurrent(["data", "hostile"], "fuzz"),
            threads: Some(16),
            environment: &[("FUZZ_SECONDS", "60")],
        },
    },
    Stage {
        name: "processes",
        what: "real processes on this machine",
        budget: 900,
        lane: Lane::Compute,
        prerequisites: &[],
        work: Work::Tests {
            of: Tests::Modules("processes", &["bad_input", "diagnose", "example", "fabric", "preflight", "run"]),
            threads: None,
            environment: &[],
        },
    },
    Stage {
        name: "report",
        what: "reports of runs, and their page in a browser",
        budget: 180,
        lane: Lane::Compute,
        prerequisites: &[Prerequisite::Browser],
        work: Work::Tests { of: Tests::Modules("processes", &["report"]), threads: None, environment: &[] },
    },
    Stage {
        name: "images",
        what: "image contents",
        budget: 900,
        lane: Lane::Compute,
        prerequisites: &[Prerequisite::Images],
        work: Work::Tests { of: Tests::Modules("processes", &["images"]), threads: None, environment: &[] },
    },
    Stage {
        name: "documentation",
        what: "tests in the documentation, rustdoc",
        budget: 600,
        lane: Lane::Compute,
        prerequisites: &[],
        work: Work::Documentation,
    },
    Stage {
        name: "plane",
        what: "controller and node agent on a real API server; documented commands",
        budget: 1200,
        lane: Lane::Wait,
        prerequisites: &[CONTROL_PLANE, CHART],
        work: Work::Tests {
            of: Tests::Modules(
                "plane",
                &[
                    "lifecycle",
                    "admission",
                    "controller",
                    "malformed",
                    "fights",
                    "rights",
                    "size",
                    "tenants",
                    "agent",
                    "documents",
                ],
            ),
            threads: Some(6),
            environment: &[],
        },
    },
    Stage {
        name: "nodes",
        what: "real nodes: pods, links, GPUs, leftovers",
        budget: 600,
        lane: Lane::Nodes,
        prerequisites: &[CONTROL_PLANE, Prerequisite::Nodes],
        work: Work::Tests { of: Tests::Modules("cluster", &["nodes"]), threads: Some(1), environment: &[] },
    },
    Stage {
        name: "e2e",
        what: "the product on real nodes: from helm install to a trained model, with faults",
        budget: 1200,
        lane: Lane::Nodes,
        prerequisites: &[CONTROL_PLANE, CHART, Prerequisite::Nodes, Prerequisite::Images],
        // Three clusters at a time, since their tests wait more than they compute.
        work: Work::Tests { of: Tests::Modules("cluster", &["e2e"]), threads: Some(3), environment: &[] },
    },
    Stage {
        name: "faults",
        what: "controller under faults",
        budget: 900,
        lane: Lane::Wait,
        prerequisites: &[CONTROL_PLANE],
        work: Work::Tests { of: Tests::Modules("plane", &["faults"]), threads: Some(2), environment: &[] },
    },
    Stage {
        name: "churn",
        what: "churn, judged offline",
        budget: 600,
        lane: Lane::Wait,
        prerequisites: &[CONTROL_PLANE],
        work: Work::Tests { of: Tests::Modules("plane", &["churn"]), threads: Some(1), environment: &[] },
    },
    Stage {
        name: "devices",
        what: "exact GPUs, with claims and without",
        budget: 600,
        lane: Lane::Wait,
        prerequisites: &[CONTROL_PLANE],
        work: Work::Tests { of: Tests::Modules("plane", &["devices"]), threads: Some(4), environment: &[] },
    },
    Stage {
        name: "chart",
        what: "the Helm chart",
        budget: 300,
        lane: Lane::Wait,
        prerequisites: &[CONTROL_PLANE, CHART],
        work: Work::Tests { of: Tests::Modules("plane", &["chart"]), threads: Some(4), environment: &[] },
    },
];

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{FRAMEWORKS, STAGES, Tests, Work};

    /// The modules declared in `text`, the source of a test program, that no stage runs.
    fn unassigned_modules(program: &str, text: &str) -> Vec<String> {
        let is_run = |module: &str| {
            STAGES.iter().any(|stage| match &stage.work {
                Work::Tests { of: Tests::Modules(name, modules), .. } => *name == program && modules.contains(&module),
                _ => false,
            })
        };
        let modules = text.lines().filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';'));
        modules.filter(|module| *module != FRAMEWORKS && !is_run(module)).map(str::to_owned).collect()
    }

    #[test]
    fn every_test_module_is_in_a_stage() {
        let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests");
        let manifest = std::fs::read_to_string(package.join("Cargo.toml")).expect("manifest");
        let names = manifest.split("[[test]]\nname = \"").skip(1).filter_map(|rest| rest.split('"').next());
        let programs: Vec<&str> = names.filter(|name| *name != "rules").collect();
        assert!(programs.contains(&"plane"), "programs of tests: {programs:?}");
        for program in programs {
            let file = package.join("tests").join(program).with_extension("rs");
            let text = std::fs::read_to_string(&file).expect("program of tests");
            assert!(text.contains("\nmod "), "{program} declares no module");
            assert_eq!(unassigned_modules(program, &text), [""; 0], "{program}: modules that no stage runs");
        }
    }

    #[test]
    fn modules_without_a_stage_are_found() {
        assert_eq!(unassigned_modules("plane", "mod lifecycle;\nmod new;\n"), ["new"]);
    }
}
