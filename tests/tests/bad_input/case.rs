//! A bad-input case and its check.

use std::process::Command;
use std::time::Duration;
use switchyard_tests::{Ended, Program, Scene, TIMEOUT, programs};

/// An accepted manifest. Its data is in the test folder's `data`.
pub(crate) const GOOD: &str = r#"apiVersion: training.switchyard.dev/v1alpha1
kind: TrainJob
metadata: {name: bad-input}
spec:
  trainer:
    numProcPerNode: 2
    cpuThreads: 1
  engine:
    model:
      type: GPT
      gpt: {layers: 1, hiddenSize: 32, heads: 2, contextLength: 32}
    data: {path: data}
    batchSizePerProcess: 2
    steps: 3
"#;

/// Input that must be refused.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) make: Make,
    pub(crate) code: i32,
    /// Texts that the error must contain.
    pub(crate) expected: &'static [&'static str],
}

/// How to create a case from a folder with good data and a good manifest.
pub(crate) enum Make {
    /// Replaces one piece of the manifest and runs the job.
    Replace(&'static str, &'static str),
    /// Changes the folder and returns the arguments of `switchyard`.
    Scene(fn(&Scene) -> Vec<String>),
}

impl Make {
    fn arguments(&self, scene: &Scene) -> Vec<String> {
        match self {
            Make::Replace(from, to) => {
                assert!(GOOD.contains(from), "the valid manifest does not contain `{from}`");
                scene.write("job.yaml", GOOD.replacen(from, to, 1));
                arguments("run job.yaml --run-dir out")
            }
            Make::Scene(make) => make(scene),
        }
    }
}

/// Creates a test folder with good data and a good manifest, `job.yaml`.
pub(crate) fn scene() -> Scene {
    let scene = Scene::new();
    scene.write_text("data/text.txt", 32);
    scene.write("job.yaml", GOOD);
    scene
}

/// Splits a line into arguments.
pub(crate) fn arguments(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_string).collect()
}

/// Runs `switchyard` as an unprivileged user. Root may read and write everything, so as root it
/// switches to another user.
pub(crate) fn unprivileged(scene: &Scene, line: &str) -> Ended {
    use std::os::unix::fs::PermissionsExt;
    if !rustix::process::geteuid().is_root() {
        return scene.switchyard(arguments(line)).run(TIMEOUT);
    }
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(scene.path(), open).expect("the scene is ours");
    // The target folder may be inaccessible to other users, so copy the programs. `cp` runs in its
    // own process: a concurrently started test could inherit a writable descriptor of ours, and the
    // program could not be executed (ETXTBSY).
    let from = ["switchyard", "switchyard-worker"].map(|program| programs().join(program));
    let copied = Command::new("cp").args(&from).arg(scene.path()).status();
    assert!(copied.is_ok_and(|status| status.success()), "cp {from:?}");
    let program = scene.join("switchyard").display().to_string();
    let user = ["--reuid=65534", "--regid=65534", "--clear-groups", &program].map(str::to_string);
    Program::new("setpriv".as_ref(), scene.path(), user.into_iter().chain(arguments(line))).run(TIMEOUT)
}

/// Runs all cases; fails with every deviation.
pub(crate) fn check_cases(cases: &[Case]) {
    let faults: Vec<String> =
        cases.iter().flat_map(|case| fault(case).map(|fault| format!("{}: {fault}", case.name))).collect();
    assert!(faults.is_empty(), "{} of {} cases:\n\n{}", faults.len(), cases.len(), faults.join("\n\n"));
}

/// Describes the deviations from the expected result.
pub(crate) fn fault(case: &Case) -> Option<String> {
    let scene = scene();
    let arguments = case.make.arguments(&scene);
    let before = scene.entries();
    let ended = scene.switchyard(&arguments).run(TIMEOUT);
    let text = format!("switchyard {}\n{}{}", arguments.join(" "), ended.stdout, ended.stderr);
    if ended.code != Some(case.code) {
        return Some(format!("exit code {:?}, signal {:?}; expected {}\n{text}", ended.code, ended.signal, case.code));
    }
    if let Some(missing) = case.expected.iter().find(|text| !ended.stderr.contains(**text)) {
        return Some(format!("the error lacks `{missing}`\n{text}"));
    }
    if ended.stderr.contains('\u{1b}') || ended.stderr.contains("panicked") {
        return Some(format!("escape codes or a panic\n{text}"));
    }
    let after = scene.entries();
    if before != after {
        let new: Vec<&String> = after.iter().filter(|entry| !before.contains(entry)).collect();
        return Some(format!("files were left behind: {new:?}\n{text}"));
    }
    let left = scene.leftovers(Duration::from_secs(1));
    (!left.is_empty()).then(|| format!("processes were left behind: {left:#?}\n{text}"))
}

#[test]
fn the_good_manifest_is_accepted() {
    let scene = scene();
    let ended = scene.switchyard(["plan", "job.yaml"]).run(TIMEOUT);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

#[test]
fn a_case_that_is_not_refused_as_expected_is_reported() {
    let case = |code, expected, make: fn(&Scene) -> Vec<String>| {
        fault(&Case { name: "planted", make: Make::Scene(make), code, expected }).unwrap_or_default()
    };
    assert!(case(2, &[], |_| arguments("plan job.yaml")).contains("exit code Some(0)"));
    assert!(case(2, &["missing text"], |_| arguments("plan gone.yaml")).contains("lacks `missing text`"));
    assert_eq!(case(2, &["gone.yaml"], |_| arguments("plan gone.yaml")), "");
}

#[test]
fn leftover_processes_are_found() {
    let scene = scene();
    let sleeper = switchyard_tests::Program::new("sleep".as_ref(), scene.path(), ["60"]).start();
    // Leftovers are found by their environment, but for a moment after `exec` the kernel shows a
    // process without one.
    let look = || Ok(Some(scene.leftovers(Duration::ZERO)).filter(|left| !left.is_empty()));
    let left = switchyard_tests::found("left over", TIMEOUT, look).unwrap();
    assert!(left.iter().any(|left| left.pid == sleeper.pid() && left.command == "sleep 60"), "{left:?}");
    left.iter().for_each(switchyard_tests::Leftover::kill);
    assert_eq!(sleeper.wait(TIMEOUT).signal, Some(9));
    scene.assert_nothing_left();
}
