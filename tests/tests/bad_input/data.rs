//! Invalid training data: refused before any rank starts.

use crate::bad_input::case::{Case, GOOD, Make, arguments, check_cases, unprivileged};
use crate::bad_input::files::make_fifo;
use std::fs;
use switchyard_tests::Scene;

/// Runs a job with another data path. `more` is appended to the fields of `data`.
fn run_on(scene: &Scene, path: &str, more: &str) -> Vec<String> {
    scene.write("job.yaml", GOOD.replace("{path: data}", &format!("{{path: {path}{more}}}")));
    arguments("run job.yaml --run-dir out")
}

/// Every message contains the path.
pub(crate) const CASES: &[Case] = &[
    Case {
        name: "missing",
        make: Make::Scene(|scene| run_on(scene, "gone", "")),
        code: 3,
        expected: &["spec.engine.data.path", "/gone", "expected a file or a directory"],
    },
    Case {
        name: "a device",
        make: Make::Scene(|scene| run_on(scene, "/dev/null", "")),
        code: 3,
        expected: &["spec.engine.data.path", "/dev/null is a", "device", "expected a file or a directory"],
    },
    Case {
        name: "an endless device",
        make: Make::Scene(|scene| run_on(scene, "/dev/zero", "")),
        code: 3,
        expected: &["spec.engine.data.path", "/dev/zero is a", "device"],
    },
    Case {
        name: "a pipe",
        make: Make::Scene(|scene| {
            make_fifo(scene, "pipe");
            run_on(scene, "pipe", "")
        }),
        code: 3,
        expected: &["spec.engine.data.path", "/pipe is a", "pipe"],
    },
    Case {
        name: "a pipe in the directory",
        make: Make::Scene(|scene| {
            make_fifo(scene, "data/pipe");
            run_on(scene, "data", ", include: [pipe]")
        }),
        code: 3,
        expected: &["data/pipe is a", "pipe"],
    },
    Case {
        name: "a link to itself",
        make: Make::Scene(|scene| {
            std::os::unix::fs::symlink("loop", scene.join("loop")).expect("a link");
            run_on(scene, "loop", "")
        }),
        code: 3,
        expected: &["spec.engine.data.path", "/loop", "symbolic links"],
    },
    Case {
        name: "nothing matches",
        make: Make::Scene(|scene| run_on(scene, "data", ", include: [\"*.rs\"]")),
        code: 3,
        expected: &["spec.engine.data.include", "none of the 1 files", "*.rs", "expected at least one"],
    },
    Case {
        name: "everything is left out",
        make: Make::Scene(|scene| run_on(scene, "data", ", exclude: [\"**\"]")),
        code: 3,
        expected: &["none of the 1 files", "expected at least one"],
    },
    Case {
        name: "an empty directory",
        make: Make::Scene(|scene| {
            fs::create_dir(scene.join("empty")).expect("a folder");
            run_on(scene, "empty", "")
        }),
        code: 3,
        expected: &["spec.engine.data", "/empty"],
    },
    Case {
        name: "empty files only",
        make: Make::Scene(|scene| {
            scene.write("hollow/a.txt", "");
            scene.write("hollow/b.txt", "");
            run_on(scene, "hollow", "")
        }),
        code: 3,
        expected: &["spec.engine.data.path", "all 2 files", "are empty", "expected text"],
    },
    Case {
        name: "too short for a step",
        make: Make::Scene(|scene| {
            scene.write("short.txt", "0123456789".repeat(7));
            run_on(scene, "short.txt", ", validationFraction: \"0\"")
        }),
        code: 3,
        expected: &["70 tokens", "one step needs", "expected more text"],
    },
    Case {
        name: "a pattern that is none",
        make: Make::Scene(|scene| run_on(scene, "data", ", include: [\"[a-\"]")),
        code: 3,
        expected: &["spec.engine.data.include[0]", "`[a-`", "expected for example"],
    },
    Case {
        name: "patterns for a file",
        make: Make::Scene(|scene| run_on(scene, "data/text.txt", ", include: [\"*.txt\"]")),
        code: 3,
        expected: &["spec.engine.data.include", "data/text.txt is a file", "expected none, or a directory"],
    },
];

#[test]
fn unusable_data_is_refused() {
    check_cases(CASES);
}

#[test]
fn an_unreadable_file_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let scene = crate::bad_input::case::scene();
    fs::set_permissions(scene.join("data/text.txt"), fs::Permissions::from_mode(0o000)).unwrap();
    let ended = unprivileged(&scene, "run job.yaml --run-dir out");
    assert_eq!(ended.code, Some(3), "{}", ended.stderr);
    for words in
        ["spec.engine.data.path: cannot read", "data/text.txt", "Permission denied", "expected a readable file"]
    {
        assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
    }
    assert!(!scene.join("out").exists());
    scene.assert_nothing_left();
}
