//! Unparseable manifests, and other unusable files and arguments.

use crate::bad_input::case::{Case, GOOD, Make, arguments, check_cases, unprivileged};
use std::fs;
use switchyard_tests::Scene;

fn run_text(scene: &Scene, text: impl AsRef<[u8]>) -> Vec<String> {
    scene.write("job.yaml", text);
    arguments("run job.yaml --run-dir out")
}

/// Every message contains the file.
pub(crate) const CASES: &[Case] = &[
    Case {
        name: "missing manifest",
        make: Make::Scene(|_| arguments("run gone.yaml")),
        code: 2,
        expected: &["SY0001", "gone.yaml", "No such file"],
    },
    Case {
        name: "manifest is a directory",
        make: Make::Scene(|_| arguments("run data")),
        code: 2,
        expected: &["SY0001", "data", "got a directory; expected a file with a TrainJob"],
    },
    Case {
        name: "manifest is a device",
        make: Make::Scene(|_| arguments("run /dev/zero")),
        code: 2,
        expected: &["SY0001", "/dev/zero", "not a regular file"],
    },
    Case {
        name: "manifest is a pipe that nobody writes",
        make: Make::Scene(|scene| {
            make_fifo(scene, "job.fifo");
            arguments("run job.fifo")
        }),
        code: 2,
        expected: &["SY0001", "job.fifo", "not a regular file"],
    },
    Case {
        name: "manifest is a link to itself",
        make: Make::Scene(|scene| {
            std::os::unix::fs::symlink("loop.yaml", scene.join("loop.yaml")).expect("a link");
            arguments("run loop.yaml")
        }),
        code: 2,
        expected: &["SY0001", "loop.yaml", "Too many levels of symbolic links"],
    },
    Case {
        name: "empty standard input",
        make: Make::Scene(|_| arguments("run -")),
        code: 2,
        expected: &["SY0002", "standard input", "no document"],
    },
    Case {
        name: "empty file",
        make: Make::Scene(|scene| run_text(scene, "")),
        code: 2,
        expected: &["SY0002", "job.yaml", "got no document; expected one TrainJob"],
    },
    Case {
        name: "comments only",
        make: Make::Scene(|scene| run_text(scene, "# nothing\n")),
        code: 2,
        expected: &["SY0002", "job.yaml"],
    },
    Case {
        name: "10 MB",
        make: Make::Scene(|scene| run_text(scene, format!("{GOOD}# {}\n", "x".repeat(10_000_000)))),
        code: 2,
        expected: &["SY0001", "job.yaml", "got more than 1 MiB", "expected a TrainJob of at most 1 MiB"],
    },
    Case {
        name: "two documents",
        make: Make::Scene(|scene| run_text(scene, format!("{GOOD}---\n{GOOD}"))),
        code: 2,
        expected: &["SY0002", "job.yaml", "got 2 documents; expected one TrainJob"],
    },
    Case {
        name: "a list",
        make: Make::Scene(|scene| run_text(scene, "[1, 2]")),
        code: 2,
        expected: &["SY0002", "job.yaml", "expected", "a TrainJob"],
    },
    Case {
        name: "a word",
        make: Make::Scene(|scene| run_text(scene, "hello")),
        code: 2,
        expected: &["SY0002", "job.yaml", "hello"],
    },
    Case {
        name: "another group",
        make: Make::Scene(|scene| run_text(scene, GOOD.replace("training.switchyard.dev/v1alpha1", "batch/v1"))),
        code: 2,
        expected: &["SY0002", "apiVersion", "`batch/v1`", "`training.switchyard.dev/v1alpha1`"],
    },
    Case {
        name: "another version",
        make: Make::Scene(|scene| run_text(scene, GOOD.replace("/v1alpha1", "/v1"))),
        code: 2,
        expected: &["SY0002", "`training.switchyard.dev/v1`", "`training.switchyard.dev/v1alpha1`"],
    },
    Case {
        name: "Kubeflow's TrainJob",
        make: Make::Scene(|scene| run_text(scene, GOOD.replace("training.switchyard.dev", "trainer.kubeflow.org"))),
        code: 2,
        expected: &["SY0002", "a TrainJob of Kubeflow Trainer, another product's kind"],
    },
    Case {
        name: "another kind",
        make: Make::Scene(|scene| run_text(scene, GOOD.replace("kind: TrainJob", "kind: Job"))),
        code: 2,
        expected: &["SY0002", "kind", "`Job`", "`TrainJob`"],
    },
    Case {
        name: "not UTF-8",
        make: Make::Scene(|scene| run_text(scene, [GOOD.as_bytes(), b"# \xff\n"].concat())),
        code: 2,
        expected: &["SY0001", "job.yaml", "not UTF-8 at offset", "expected text"],
    },
    Case {
        name: "indented with a tab",
        make: Make::Scene(|scene| run_text(scene, GOOD.replace("  trainer:", "\ttrainer:"))),
        code: 2,
        expected: &["SY0001", "job.yaml is not valid YAML", "tab"],
    },
    Case {
        name: "open bracket",
        make: Make::Scene(|scene| run_text(scene, "kind: [TrainJob\n")),
        code: 2,
        expected: &["SY0001", "job.yaml is not valid YAML"],
    },
    Case {
        name: "a key twice",
        make: Make::Scene(|scene| run_text(scene, format!("{GOOD}    steps: 4\n"))),
        code: 2,
        expected: &["SY0001", "job.yaml is not valid YAML", "steps"],
    },
    Case {
        name: "aliases that multiply",
        make: Make::Scene(|scene| {
            let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_string();
            for level in 1..12 {
                let alias = format!("*a{}", level - 1);
                text.push_str(&format!("a{level}: &a{level} [{}]\n", [alias.as_str(); 9].join(", ")));
            }
            run_text(scene, text)
        }),
        code: 2,
        expected: &["SY0001", "job.yaml is not valid YAML"],
    },
    Case {
        name: "run directory is a file",
        make: Make::Scene(|_| arguments("run job.yaml --run-dir data/text.txt")),
        code: 2,
        expected: &["data/text.txt", "Not a directory", "--run-dir"],
    },
    Case {
        name: "run directory below a file",
        make: Make::Scene(|_| arguments("run job.yaml --run-dir data/text.txt/out")),
        code: 2,
        expected: &["data/text.txt/out", "Not a directory", "--run-dir"],
    },
    Case {
        name: "run directory where nobody may write",
        make: Make::Scene(|_| arguments("run job.yaml --run-dir /proc/switchyard-run")),
        code: 2,
        expected: &["cannot make the run directory /proc/switchyard-run", "choose another with --run-dir"],
    },
    Case {
        name: "run directory is not empty",
        make: Make::Scene(|_| arguments("run job.yaml --run-dir data")),
        code: 2,
        expected: &["data is not empty", "expected a new or an empty directory"],
    },
    Case {
        name: "missing topology",
        make: Make::Scene(|_| arguments("plan job.yaml --topology gone.yaml")),
        code: 2,
        expected: &["gone.yaml", "No such file"],
    },
    Case {
        name: "a TrainJob as topology",
        make: Make::Scene(|_| arguments("plan job.yaml --topology job.yaml")),
        code: 2,
        expected: &["job.yaml is not a GPUTopology"],
    },
    Case {
        name: "another kind as topology",
        make: Make::Scene(|scene| {
            scene.write("node.yaml", "apiVersion: v1\nkind: Node\nstatus: {}\n");
            arguments("topo node.yaml")
        }),
        code: 2,
        expected: &[
            "node.yaml is not a GPUTopology",
            "apiVersion: got `v1`",
            "expected `training.switchyard.dev/v1alpha1`",
        ],
    },
    Case {
        name: "a matrix that is cut off",
        make: Make::Scene(|scene| {
            scene.write("topo.txt", "     GPU0 GPU1 CPU Affinity\nGPU0  X   PHB  0-3\n");
            arguments("topo import topo.txt")
        }),
        code: 2,
        expected: &[
            "topo.txt cannot be used as output of `nvidia-smi topo -m`",
            "row GPU1: got no row",
            "expected one row",
        ],
    },
    Case {
        name: "a TrainJob as matrix",
        make: Make::Scene(|_| arguments("topo import job.yaml")),
        code: 2,
        expected: &["job.yaml", "got no header", "GPU0 GPU1 NIC0 CPU Affinity"],
    },
    Case {
        name: "a file before import",
        make: Make::Scene(|_| arguments("topo job.yaml import job.yaml")),
        code: 2,
        expected: &["got a FILE before `import`", "expected it after"],
    },
    Case {
        name: "a TrainJob as topology file of NCCL",
        make: Make::Scene(|_| arguments("topo xml --check job.yaml")),
        code: 2,
        expected: &["job.yaml is no topology file of NCCL", "got no tag", "expected <system version=\"1\">"],
    },
    Case {
        name: "a topology file of a machine that is not there",
        make: Make::Scene(|scene| {
            scene.write("topo.xml", "<system version=\"1\"></system>");
            arguments("topo xml --check topo.xml --topology gone.yaml")
        }),
        code: 2,
        expected: &["gone.yaml", "No such file"],
    },
    Case {
        name: "a missing matrix",
        make: Make::Scene(|_| arguments("topo import gone.txt")),
        code: 2,
        expected: &["gone.txt", "No such file"],
    },
    Case {
        name: "an imported machine with a name that no node has",
        make: Make::Scene(|_| arguments("topo import job.yaml --name GPU_7")),
        code: 2,
        expected: &["--name", "GPU_7", "expected a node name"],
    },
    Case {
        name: "a topology without a machine",
        make: Make::Scene(|scene| {
            let text =
                "apiVersion: training.switchyard.dev/v1alpha1\nkind: GPUTopology\nmetadata: {name: box}\nspec: {}\n";
            scene.write("node.yaml", text);
            arguments("plan job.yaml --topology node.yaml")
        }),
        code: 2,
        expected: &["node.yaml: status: got nothing", "expected the description of a machine"],
    },
    Case {
        name: "an endless topology",
        make: Make::Scene(|_| arguments("topo /dev/zero")),
        code: 2,
        expected: &["SY0001", "/dev/zero", "not a regular file; expected a file with a GPUTopology"],
    },
    Case {
        name: "a topology from a pipe that nobody writes",
        make: Make::Scene(|scene| {
            make_fifo(scene, "node.fifo");
            arguments("plan job.yaml --topology node.fifo")
        }),
        code: 2,
        expected: &["SY0001", "node.fifo", "not a regular file"],
    },
    Case {
        name: "a text as machine",
        make: Make::Scene(|_| arguments("topo data/text.txt")),
        code: 2,
        expected: &["data/text.txt is not a GPUTopology"],
    },
    Case {
        name: "unknown subcommand",
        make: Make::Scene(|_| arguments("rum job.yaml")),
        code: 2,
        expected: &["unrecognized subcommand 'rum'", "'run'"],
    },
    Case {
        name: "unknown flag",
        make: Make::Scene(|_| arguments("run job.yaml --rundir out")),
        code: 2,
        expected: &["'--rundir'", "'--run-dir'"],
    },
    Case {
        name: "unknown error code",
        make: Make::Scene(|_| arguments("explain SY9999")),
        code: 2,
        expected: &["no error code `SY9999`", "SY0001"],
    },
];

pub(crate) fn make_fifo(scene: &Scene, name: &str) {
    let path = scene.join(name);
    let made = std::process::Command::new("mkfifo").arg(&path).status();
    assert!(made.is_ok_and(|status| status.success()) && fs::metadata(&path).is_ok(), "mkfifo {}", path.display());
}

#[test]
fn unusable_files_are_refused() {
    check_cases(CASES);
}

#[test]
fn a_run_directory_without_permission_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let scene = crate::bad_input::case::scene();
    fs::create_dir(scene.join("closed")).unwrap();
    fs::set_permissions(scene.join("closed"), fs::Permissions::from_mode(0o555)).unwrap();
    for run_dir in ["closed", "closed/out"] {
        let ended = unprivileged(&scene, &format!("run job.yaml --run-dir {run_dir}"));
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        for words in ["cannot make the run directory", run_dir, "Permission denied", "choose another with --run-dir"] {
            assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
        }
        assert_eq!(fs::read_dir(scene.join("closed")).unwrap().count(), 0);
        scene.assert_nothing_left();
    }
}
