//! NCCL's log, with `NCCL_DEBUG=INFO`: the channel of a ring from each rank to the next.

use super::socket::Hello;
use std::fs::File;
use std::io::{Write, stdout};

/// Logs the channel. `device` is the rank's GPU, from 1.
pub(super) fn channels(device: usize, Hello { rank, world, .. }: Hello, next_is_local: bool) {
    if world < 2 || std::env::var_os("NCCL_DEBUG").is_none_or(|level| level != "INFO") {
        return;
    }
    let (next, gpu) = ((rank + 1) % world, device - 1);
    let via = if next_is_local { "via P2P/IPC" } else { "[send] via NET/Socket/0" };
    let head = format!("reference:{}:0 [{gpu}] NCCL INFO", std::process::id());
    let text = format!(
        "{head} NET/Socket : Using [0]lo:127.0.0.1<0>\n{head} Using network Socket\n\
         {head} Channel 00/0 : {rank}[{gpu}] -> {next}[0] {via}\n{head} Connected all rings\n"
    );
    // NCCL also continues without its log.
    let _ = match std::env::var_os("NCCL_DEBUG_FILE") {
        Some(path) => {
            File::options().append(true).create(true).open(path).and_then(|mut file| file.write_all(text.as_bytes()))
        }
        None => stdout().write_all(text.as_bytes()),
    };
}
