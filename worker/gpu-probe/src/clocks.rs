//! Records power, clocks and temperature during a run.

use std::fs::File;
use std::io::copy;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// File name in the results folder.
const FILE: &str = "clocks.txt";

/// `nvidia-smi dmon`. It also keeps the device open: without a client the driver unloads the GPU,
/// and each part would wait seconds for it again.
pub(crate) struct Clocks(Child);

impl Clocks {
    /// Starts recording.
    ///
    /// # Errors
    /// `nvidia-smi` or the file is missing.
    pub(crate) fn start(folder: &Path) -> std::io::Result<Clocks> {
        let mut file = File::options().create(true).append(true).open(folder.join(FILE))?;
        let mut command = Command::new("nvidia-smi");
        command.args(["dmon", "-s", "pucm", "-d", "5", "-o", "T"]).stdin(Stdio::null()).stderr(Stdio::null());
        let mut child = command.stdout(Stdio::piped()).spawn()?;
        let output = child.stdout.take();
        // Through a pipe, so that it ends by itself if this process is killed.
        std::thread::spawn(move || output.map(|mut output| copy(&mut output, &mut file)));
        Ok(Clocks(child))
    }
}

impl Drop for Clocks {
    fn drop(&mut self) {
        // It may have exited on its own.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
