//! A set of namespaces with an init process: whatever is started in it ends with it, and what was mounted or connected in it is gone.

use crate::{Daemon, Ended, Program};
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// For the init process to set its namespaces up, on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// What the init process says when it has.
const READY: &str = "ready";

/// Namespaces, ended on drop and with this process.
#[derive(Debug)]
pub(super) struct Namespace {
    init: Daemon,
    pid: u32,
    kinds: Vec<&'static str>,
    /// Files by which a process enters the cgroups of those that are in it.
    groups: Vec<PathBuf>,
    folder: PathBuf,
}

/// Enters the cgroups of its first arguments, up to `--`, and becomes the program after it.
const ENTER: &str =
    r#"while [ "$1" != -- ]; do echo 0 > "$1"; shift; done; shift; exec setpriv --pdeathsig KILL -- "$@""#;

impl Namespace {
    /// New namespaces of these kinds (as unshare(1) and nsenter(1) name them) beside those of processes, in which a shell runs
    /// `script` first. `groups`: files by which a process enters the cgroups that everything in it is in.
    ///
    /// # Errors
    /// The kernel refuses, or the script fails: then its output is in the error.
    pub(super) fn start(
        kinds: &[&'static str],
        groups: Vec<PathBuf>,
        script: &str,
        folder: &Path,
        name: &str,
    ) -> Result<Namespace> {
        let kinds = [kinds, &["--pid"]].concat();
        let mut arguments: Vec<String> = kinds.iter().map(ToString::to_string).collect();
        // Whoever is started in it and loses its parent becomes a child of init. One that ignores SIGCHLD leaves no zombies, and
        // what is ignored stays so over exec.
        let enter: String = groups.iter().map(|file| format!("echo 0 > {}\n", file.display())).collect();
        let script = format!("set -e\n{enter}{script}\necho {READY}\ntrap '' CHLD\nexec sleep infinity\n");
        arguments.extend(["--fork", "--kill-child"].map(String::from));
        if kinds.contains(&"--mount") {
            arguments.push("--mount-proc".into());
        }
        // The last one is for the table of processes.
        arguments.extend(["sh".into(), "-c".into(), script, folder.join(name).display().to_string()]);
        let log = folder.join(format!("{name}.log"));
        let mut init = Daemon::start(Path::new("unshare"), &arguments, &[], &log)?;
        let give_up = Instant::now() + PATIENCE;
        while !fs::read_to_string(&log)?.lines().any(|line| line == READY) {
            init.must_run()?;
            ensure!(Instant::now() < give_up, "no namespaces after {} s: {}", PATIENCE.as_secs(), init.tail());
            std::thread::sleep(Duration::from_millis(10));
        }
        let children = format!("/proc/{0}/task/{0}/children", init.pid());
        let pid = fs::read_to_string(&children)?.trim().parse().with_context(|| children)?;
        Ok(Namespace { init, pid, kinds, groups, folder: folder.to_path_buf() })
    }

    /// Process id of its init.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    fn enter(&self, program: &Path, arguments: &[String]) -> Vec<String> {
        let mut all = vec![format!("--target={}", self.pid)];
        all.extend(self.kinds.iter().map(ToString::to_string));
        // nsenter forks to enter a namespace of processes: its child ends with it.
        all.extend(["--", "sh", "-ec", ENTER, "enter"].map(String::from));
        all.extend(self.groups.iter().map(|file| file.display().to_string()));
        all.push("--".into());
        all.push(program.display().to_string());
        all.extend(arguments.iter().cloned());
        all
    }

    /// Starts a program in it that stays.
    ///
    /// # Errors
    /// It cannot be started.
    pub(super) fn daemon(
        &self,
        program: &Path,
        arguments: &[String],
        environment: &[(&str, String)],
    ) -> Result<Daemon> {
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let log = self.folder.join(format!("{name}.log"));
        Daemon::start(Path::new("nsenter"), &self.enter(program, arguments), environment, &log)
    }

    /// Runs a program in it.
    pub(super) fn run(&self, program: &str, arguments: &[&str]) -> Ended {
        let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
        Program::new(Path::new("nsenter"), &self.folder, self.enter(Path::new(program), &arguments)).run(PATIENCE)
    }

    /// Runs a shell script in it.
    ///
    /// # Errors
    /// A command of it fails.
    pub(super) fn shell(&self, script: &str) -> Result<String> {
        done(script, self.run("sh", &["-ec", script]))
    }

    /// Fails with what the init process said if it has ended.
    ///
    /// # Errors
    /// It has ended.
    pub(super) fn must_run(&mut self) -> Result<()> {
        self.init.must_run()
    }
}

/// Runs a shell script on this machine.
///
/// # Errors
/// A command of it fails.
pub(super) fn shell(script: &str, folder: &Path) -> Result<String> {
    done(script, Program::new(Path::new("sh"), folder, ["-ec", script]).run(PATIENCE))
}

fn done(what: &str, ended: Ended) -> Result<String> {
    if ended.code != Some(0) {
        bail!("{what}\n{:?}: {}{}", ended.code, ended.stdout, ended.stderr);
    }
    Ok(ended.stdout)
}
