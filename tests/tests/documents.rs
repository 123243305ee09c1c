//! Runs the commands shown in the documentation. Commands that need no real nodes run here
//! verbatim. For slow cargo commands, this only checks that they exist. `e2e.rs` runs the rest;
//! `tidy.rs` finds blocks without a declared environment.

use anyhow::{Context, Result, ensure};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Instant;
use switchyard_tests::TIMEOUT;
use switchyard_tests::documents::{Block, Class, Command, blocks, documents};
use switchyard_tests::{
    ControlPlane, Daemon, Ended, Kubelet, KubeletOptions, Options, Program, agent_program, cargo, gpu_probe, programs,
    root,
};

/// All code blocks, page by page.
fn pages() -> Result<Vec<(String, Vec<Block>)>> {
    documents()?.into_iter().map(|page| Ok((page.clone(), blocks(&page)?))).collect()
}

/// A user's clone after `cargo xtask install` and `cargo build --release`: the repository's files,
/// with the programs on the PATH.
struct Clone {
    folder: tempfile::TempDir,
    environment: Vec<(&'static str, String)>,
}

impl Clone {
    fn new() -> Result<Clone> {
        let folder = tempfile::tempdir()?;
        for entry in fs::read_dir(root())? {
            let name = entry?.file_name();
            if !["target", "runs", ".git"].iter().any(|left_out| name == *left_out) {
                symlink(root().join(&name), folder.path().join(&name))?;
            }
        }
        let bin = folder.path().join("target/release");
        fs::create_dir_all(&bin)?;
        for program in
            [&programs().join("switchyard"), &programs().join("switchyard-worker"), agent_program(), gpu_probe()]
        {
            symlink(program, bin.join(program.file_name().context("a name")?))?;
        }
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
        let environment = vec![("PATH", path), ("HOME", folder.path().display().to_string())];
        Ok(Clone { folder, environment })
    }

    fn command(&self, line: &str) -> Program {
        let shell = Program::new(Path::new("/bin/sh"), self.folder.path(), ["-euc", line]);
        self.environment.iter().fold(shell, |shell, (name, value)| shell.env(name, value))
    }
}

/// How a command deviates from its page; `None` if it behaves as documented.
fn fault(command: &Command, ended: &Ended, exit: i32) -> Option<String> {
    if ended.code != Some(exit) {
        return Some(format!("exit {:?}, expected {exit}\n{}{}", ended.code, ended.stdout, ended.stderr));
    }
    let expected = command.output.as_ref()?;
    let got = ended.stdout.trim_end();
    (got != expected).then(|| format!("got\n{got}\nexpected by the page\n{expected}"))
}

#[test]
fn local_commands_behave_as_documented() -> Result<()> {
    let (mut faults, mut count) = (Vec::new(), 0);
    for (_, blocks) in pages()? {
        let mut clone = None;
        for block in blocks {
            let Ok(Class::Local { exit }) = block.class() else { continue };
            // Each page has its own folder, so that later blocks find the files of earlier ones.
            if clone.is_none() {
                clone = Some(Clone::new()?);
            }
            let Some(clone) = &clone else { continue };
            let commands: Vec<Command> = block.commands().into_iter().filter(|command| !command.is_skipped()).collect();
            ensure!(!commands.is_empty(), "{}: no command to run; expected the class build", block.location);
            let last = commands.len() - 1;
            for (at, command) in commands.iter().enumerate() {
                let ended = clone.command(&command.line).run(TIMEOUT);
                println!("{:5.1} s  {}: {}", ended.time.as_secs_f64(), block.location, command.line);
                let fault = fault(command, &ended, if at == last { exit } else { 0 });
                faults.extend(fault.map(|fault| format!("{}: {}: {fault}", block.location, command.line)));
                count += 1;
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(count >= 15, "{count} commands");
    Ok(())
}

#[test]
fn undocumented_behaviour_is_detected() -> Result<()> {
    let clone = Clone::new()?;
    let run = |line: &str, output: Option<&str>, exit: i32| {
        let command = Command { line: line.into(), output: output.map(str::to_string) };
        fault(&command, &clone.command(line).run(TIMEOUT), exit)
    };
    assert_eq!(run("switchyard version | cut -d' ' -f1", Some("switchyard"), 0), None);
    for (line, output, exit, words) in [
        ("switchyard lint gone.yaml", None, 0, "exit Some(2), expected 0"),
        ("switchyard version", None, 1, "exit Some(0), expected 1"),
        ("switchyard version", Some("another"), 0, "expected by the page\nanother"),
    ] {
        let found = run(line, output, exit);
        assert!(found.as_ref().is_some_and(|found| found.contains(words)), "{line}: {found:?}");
    }
    Ok(())
}

/// Why cargo would not start a command; `None` if it would.
fn cargo_fault(words: &[&str]) -> Option<String> {
    let run = |arguments: &[&str]| {
        let ended = cargo(arguments).output().expect("cargo starts");
        (!ended.status.success()).then(|| String::from_utf8_lossy(&ended.stderr).into_owned())
    };
    // With `--help`, a program validates the preceding arguments and does nothing.
    let xtask = |arguments: &[&str]| {
        let ended = Program::new(switchyard_tests::xtask(), root(), arguments).run(TIMEOUT);
        (ended.code != Some(0)).then_some(ended.stderr)
    };
    let package = |name: &str| run(&["pkgid", "-p", name]);
    match words {
        // Arguments after the file are for `switchyard run`, and the file must exist.
        ["xtask", "run", options @ .., file] => {
            let missing_file = (!root().join(file).is_file()).then(|| format!("no file {file}"));
            let worker = options.iter().position(|option| *option == "--worker").and_then(|at| options.get(at + 1));
            missing_file
                .or_else(|| worker.and_then(|name| package(name)))
                .or_else(|| xtask(&[&["run"], options, &["--help"]].concat()))
        }
        ["xtask", "programs", names @ ..] => {
            switchyard_tests::programs_of(names).err().map(|error| format!("{error:#}"))
        }
        ["xtask", arguments @ ..] => xtask(&[arguments, &["--help"]].concat()),
        ["build", "--release", "-p", name] => package(name),
        _ => Some("this test cannot check this command".into()),
    }
}

#[test]
fn documented_cargo_commands_exist() -> Result<()> {
    let (mut faults, mut count) = (Vec::new(), 0);
    for block in pages()?.into_iter().flat_map(|(_, blocks)| blocks) {
        for command in block.commands() {
            let cargo_arguments = command.cargo_arguments();
            if cargo_arguments.is_empty() && block.class() == Ok(Class::Build) {
                faults.push(format!(
                    "{}: {}: not a cargo command, in a block of class build",
                    block.location, command.line
                ));
            }
            for words in cargo_arguments {
                let fault = cargo_fault(&words);
                faults.extend(fault.map(|fault| format!("{}: {}: {fault}", block.location, command.line)));
                count += 1;
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(count >= 10, "{count} commands");
    for faulty in [
        &["xtask", "imagse"][..],
        &["xtask", "images", "--layuot", "x"],
        &["xtask", "run", "examples/gone.yaml"],
        &["xtask", "run", "--worker", "switchyard-gone", "examples/mlp.yaml"],
        &["xtask", "run", "--wroker", "xtask", "examples/mlp.yaml"],
        &["xtask", "cluster", "up", "--nodes", "9"],
        &["xtask", "programs", "helmet"],
        &["build", "--release", "-p", "switchyard-gone"],
        &["instal", "x"],
    ] {
        assert!(cargo_fault(faulty).is_some(), "cargo {faulty:?}");
    }
    Ok(())
}

/// docs/first-job-on-a-laptop.md, "Without real nodes": runs the commands verbatim, except for the
/// cluster itself, which is the one that `cargo xtask cluster up` starts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_job_page_leads_to_a_job_without_real_nodes() -> Result<()> {
    let plane = ControlPlane::start(&Options { controller_manager: true, scheduler: true, ..Options::default() })?;
    plane.install_crds().await?;
    let mut options = KubeletOptions::new("node", 4);
    (options.policy, options.programs) = ("worker".parse()?, Some(programs().to_path_buf()));
    let _kubelet = Kubelet::start(plane.config().await?, options).await?;
    let mut clone = Clone::new()?;
    symlink(plane.kubectl_program(), clone.folder.path().join("target/release/kubectl"))?;
    clone.environment.push(("KUBECONFIG", plane.kubeconfig("admin").display().to_string()));
    let (mut output_text, mut running) = (String::new(), Vec::new());
    let all = pages()?.into_iter().flat_map(|(_, blocks)| blocks);
    for block in all.filter(|block| block.class() == Ok(Class::Plane)) {
        for command in block.commands().into_iter().filter(|command| !command.is_skipped()) {
            let begin = Instant::now();
            match command.line.strip_suffix('&') {
                // Run in the background, as in a shell. The command ends with the test.
                Some(line) => {
                    let log = clone.folder.path().join("background.log");
                    let words = ["-euc".to_string(), format!("exec {line}")];
                    running.push(Daemon::start(Path::new("/bin/sh"), &words, &clone.environment, &log)?);
                }
                None => {
                    let ended = clone.command(&command.line).run(TIMEOUT);
                    ensure!(
                        ended.code == Some(0),
                        "{}: {}: {}{}",
                        block.location,
                        command.line,
                        ended.stdout,
                        ended.stderr
                    );
                    output_text.push_str(&ended.stdout);
                }
            }
            println!("{:5.1} s  {}: {}", begin.elapsed().as_secs_f64(), block.location, command.line);
        }
    }
    for mut daemon in running {
        daemon.signal(rustix::process::Signal::TERM);
        ensure!(daemon.wait(TIMEOUT) == Some(0), "it does not exit with 0: {}", daemon.tail());
    }
    ensure!(
        output_text.contains("->Complete ") && output_text.contains("step=300/300") && output_text.contains("gpt-pods"),
        "{output_text}"
    );
    Ok(())
}
