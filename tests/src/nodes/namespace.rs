//! A set of namespaces with an init process. When init ends, the kernel ends all processes in them
//! and removes their mounts and network links.

use crate::{Daemon, Ended, Program, TIMEOUT};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};

/// Printed by the init process when setup is complete.
const READY: &str = "ready";

/// Namespaces that end on drop and with this process.
#[derive(Debug)]
pub(super) struct Namespace {
    init: Daemon,
    pid: u32,
    kinds: Vec<&'static str>,
    /// Files through which processes join the namespaces' cgroups.
    groups: Vec<PathBuf>,
    folder: PathBuf,
}

/// Joins the cgroups in the arguments before `--`, then executes the program after it.
const ENTER: &str =
    r#"while [ "$1" != -- ]; do echo 0 > "$1"; shift; done; shift; exec setpriv --pdeathsig KILL -- "$@""#;

impl Namespace {
    /// Creates namespaces of these kinds, as named by unshare(1) and nsenter(1), and a PID
    /// namespace. A shell runs `script` in them first. All processes join the cgroups in `groups`
    /// through these files.
    ///
    /// # Errors
    /// The kernel refuses, or the script fails; then the error contains its output.
    pub(super) fn start(
        kinds: &[&'static str],
        groups: Vec<PathBuf>,
        script: &str,
        folder: &Path,
        name: &str,
    ) -> Result<Namespace> {
        let kinds = [kinds, &["--pid"]].concat();
        let mut arguments: Vec<String> = kinds.iter().map(ToString::to_string).collect();
        // Orphaned processes become children of init. An init that ignores SIGCHLD leaves no
        // zombies, and exec preserves the ignored signal.
        let enter: String = groups.iter().map(|file| format!("echo 0 > {}\n", file.display())).collect();
        let script = format!("set -e\n{enter}{script}\necho {READY}\ntrap '' CHLD\nexec sleep infinity\n");
        arguments.extend(["--fork", "--kill-child"].map(String::from));
        if kinds.contains(&"--mount") {
            arguments.push("--mount-proc".into());
        }
        // The last argument is only for the process list, where it identifies the cluster.
        arguments.extend(["sh".into(), "-c".into(), script, folder.join(name).display().to_string()]);
        let log = folder.join(format!("{name}.log"));
        let mut init = Daemon::start(Path::new("unshare"), &arguments, &[], &log)?;
        let is_ready = || Ok(fs::read_to_string(&log)?.lines().any(|line| line == READY));
        init.until("in its namespaces", TIMEOUT, is_ready)?;
        let children = format!("/proc/{0}/task/{0}/children", init.pid());
        let pid = fs::read_to_string(&children)?.trim().parse().with_context(|| children)?;
        Ok(Namespace { init, pid, kinds, groups, folder: folder.to_path_buf() })
    }

    /// Process ID of init.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    fn enter(&self, program: &Path, arguments: &[String]) -> Vec<String> {
        let mut all = vec![format!("--target={}", self.pid)];
        all.extend(self.kinds.iter().map(ToString::to_string));
        // nsenter forks to enter a PID namespace; the child ends with it.
        all.extend(["--", "sh", "-ec", ENTER, "enter"].map(String::from));
        all.extend(self.groups.iter().map(|file| file.display().to_string()));
        all.push("--".into());
        all.push(program.display().to_string());
        all.extend(arguments.iter().cloned());
        all
    }

    /// Starts a long-running program in the namespaces.
    ///
    /// # Errors
    /// The program cannot be started.
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

    /// Runs a program in the namespaces until it ends.
    pub(super) fn run(&self, program: &str, arguments: &[&str]) -> Ended {
        let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
        Program::new(Path::new("nsenter"), &self.folder, self.enter(Path::new(program), &arguments)).run(TIMEOUT)
    }

    /// Runs a shell script in the namespaces.
    ///
    /// # Errors
    /// A command fails.
    pub(super) fn shell(&self, script: &str) -> Result<String> {
        checked(script, self.run("sh", &["-ec", script]))
    }

    /// Checks that the init process is still running.
    ///
    /// # Errors
    /// It has ended; the error contains its output.
    pub(super) fn ensure_running(&mut self) -> Result<()> {
        self.init.ensure_running()
    }
}

/// Runs a shell script on this machine.
///
/// # Errors
/// A command fails.
pub(super) fn shell(script: &str, folder: &Path) -> Result<String> {
    checked(script, Program::new(Path::new("sh"), folder, ["-ec", script]).run(TIMEOUT))
}

fn checked(what: &str, ended: Ended) -> Result<String> {
    if ended.code != Some(0) {
        bail!("{what}\n{:?}: {}{}", ended.code, ended.stdout, ended.stderr);
    }
    Ok(ended.stdout)
}
