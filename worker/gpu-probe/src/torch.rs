//! PyTorch's side of the comparison: the benchmark models in a process that stays alive through all
//! rounds.

use crate::outcome::Outcome;
use crate::scratch;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Documents its protocol.
const SCRIPT: &str = include_str!("../../benches/torch_engine.py");

/// The PyTorch process.
pub(crate) struct Peer {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    log: PathBuf,
    /// PyTorch's version and environment, as reported by the script.
    pub(crate) version: Value,
}

impl Peer {
    /// `name` is the log file's name, `config` is described in the script, `device` is the GPU
    /// index. Without PyTorch or a usable GPU, the error is PyTorch's message.
    pub(crate) fn start(python: &Path, name: &str, config: &Value, device: usize) -> Result<Peer, Outcome> {
        let failed = |error: std::io::Error| Outcome::absent(format!("{}: {error}", python.display()));
        let log = scratch::folder("torch").map_err(failed)?.join(name);
        let mut command = Command::new(python);
        command.arg("-c").arg(SCRIPT).arg(config.to_string());
        if device > 0 {
            command.env("CUDA_VISIBLE_DEVICES", device.to_string());
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(&log).map_err(failed)?);
        let mut child = command.spawn().map_err(failed)?;
        let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Outcome::failed("torch", "invariant: both pipes were requested"));
        };
        let mut peer = Peer { child, to, from: BufReader::new(from), log, version: Value::Null };
        // Without PyTorch, the last line of its log is the reason.
        peer.version = peer.response().map_err(|outcome| match outcome {
            Outcome::Failed { text, .. } => Outcome::absent(text),
            other => other,
        })?;
        Ok(peer)
    }

    /// Mean milliseconds per step over this many steps.
    pub(crate) fn milliseconds(&mut self, steps: u64) -> Result<f64, Outcome> {
        let all: Vec<[f64; 2]> = self.request("steps", steps)?;
        let sum: f64 = all.iter().map(|[wall, _]| wall).sum();
        Ok(sum / all.len() as f64)
    }

    /// Peak GPU memory of its tensors, bytes.
    pub(crate) fn memory_bytes(&mut self) -> Result<u64, Outcome> {
        self.request("memory", 0)
    }

    fn request<T: DeserializeOwned>(&mut self, word: &str, count: u64) -> Result<T, Outcome> {
        // If the process has exited, reading the answer reports why.
        let _ = writeln!(self.to, "{word} {count}").and_then(|()| self.to.flush());
        self.response()
    }

    fn response<T: DeserializeOwned>(&mut self) -> Result<T, Outcome> {
        let mut line = String::new();
        let read = self.from.read_line(&mut line);
        let log = || {
            let text = std::fs::read_to_string(&self.log).unwrap_or_default();
            text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it exited without output").to_owned()
        };
        match (read, serde_json::from_str(&line)) {
            (Ok(1..), Ok(answer)) => Ok(answer),
            (Ok(1..), Err(_)) => Err(Outcome::failed("torch", format!("printed `{}`; {}", line.trim(), log()))),
            _ => Err(Outcome::failed("torch", log())),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have exited on its own.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
