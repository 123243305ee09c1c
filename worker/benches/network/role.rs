//! Our side's processes on the hosts: a rank of an all-reduce, or an end of plain streams.

use super::Outcome;
use super::hosts::Hosts;
use super::rank::Rank;
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};
use switchyard_worker::comm::{Force, GroupConfig, Options, Token, Wire};

/// Variable with the [`Role`] of a process.
pub const VARIABLE: &str = "NETWORK_ROLE";
pub const PORT: u16 = 29400;
/// Bytes that a stream writes at once.
const BLOCK: usize = 256 << 10;
const PATIENCE: Duration = Duration::from_secs(30);

/// What a process does; also the argument of the peers' script.
#[derive(Clone, Serialize, Deserialize)]
#[serde(tag = "role", rename_all = "camelCase")]
pub enum Role {
    /// Sends `bytes` to the next host and receives as many from the previous one. Host 0 prints
    /// the seconds that the slowest took.
    Stream { rank: usize, ranks: usize, bytes: usize },
    /// Reduces buckets of each size `calls` times. Rank 0 prints [`Times`] for each size.
    #[serde(rename_all = "camelCase")]
    AllReduce { rank: usize, ranks: usize, sizes: Vec<(usize, usize)>, half: bool, key: Vec<u8> },
}

/// Seconds of the slowest rank, call by call.
#[derive(Serialize, Deserialize)]
pub struct Times {
    pub bytes: usize,
    pub seconds: Vec<f64>,
}

impl Role {
    /// This program in this role on the host of its rank.
    pub fn command(&self, hosts: &Hosts) -> Outcome<Command> {
        let (Role::Stream { rank, .. } | Role::AllReduce { rank, .. }) = self;
        let program = std::env::current_exe()?;
        let mut command = hosts.command(*rank, program.to_str().ok_or("the path of this program is not UTF-8")?);
        command.env(VARIABLE, serde_json::to_string(self)?);
        Ok(command)
    }
}

pub fn run(role: &str) -> Outcome<()> {
    match serde_json::from_str(role)? {
        Role::Stream { rank, ranks, bytes } => stream(rank, ranks, bytes),
        Role::AllReduce { rank, ranks, sizes, half, key } => {
            let file = tempfile::NamedTempFile::new()?;
            file.as_file().write_all(&key)?;
            all_reduce(rank, ranks, &sizes, half, Token::from_file(file.path())?)
        }
    }
}

fn stream(rank: usize, ranks: usize, bytes: usize) -> Outcome<()> {
    let listener = TcpListener::bind((Hosts::address(rank), PORT))?;
    let mut next = connect(&Hosts::address((rank + 1) % ranks))?;
    let (mut previous, _) = listener.accept()?;
    let sender = std::thread::spawn(move || -> std::io::Result<TcpStream> {
        let block = vec![1_u8; BLOCK];
        for _ in 0..bytes / BLOCK {
            next.write_all(&block)?;
        }
        Ok(next)
    });
    let mut block = vec![0_u8; BLOCK];
    previous.read_exact(&mut block)?;
    let start = Instant::now();
    for _ in 1..bytes / BLOCK {
        previous.read_exact(&mut block)?;
    }
    let seconds = start.elapsed().as_secs_f64() * bytes as f64 / (bytes - BLOCK) as f64;
    let mut next = sender.join().map_err(|_| "the sender panicked")??;
    // The times travel around the ring, and the slowest reaches host 0.
    let mut slowest = [0; 8];
    if rank == 0 {
        next.write_all(&seconds.to_le_bytes())?;
        previous.read_exact(&mut slowest)?;
        println!("{}", f64::from_le_bytes(slowest));
    } else {
        previous.read_exact(&mut slowest)?;
        next.write_all(&f64::from_le_bytes(slowest).max(seconds).to_le_bytes())?;
    }
    Ok(())
}

fn connect(address: &str) -> Outcome<TcpStream> {
    let start = Instant::now();
    loop {
        match TcpStream::connect((address, PORT)) {
            Ok(stream) => return Ok(stream),
            Err(error) if start.elapsed() > PATIENCE => return Err(format!("{address}: {error}").into()),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

fn all_reduce(rank: usize, ranks: usize, sizes: &[(usize, usize)], half: bool, key: Token) -> Outcome<()> {
    let config = GroupConfig {
        job: "bench".to_owned(),
        attempt: 1,
        node_rank: rank as u32,
        num_nodes: ranks as u32,
        procs_per_node: 1,
        local_rank: 0,
        servers: 0,
        server: None,
        rendezvous: format!("{}:{PORT}", Hosts::address(0)),
        key,
        transport: Force::Auto,
        host_id: String::new(),
        peer_timeout: PATIENCE,
        connect_timeout: PATIENCE,
    };
    let wire = if half { Wire::F16 } else { Wire::F32 };
    // All sizes, then a value as a barrier, then the times of all ranks.
    let mut lens: Vec<usize> = sizes.iter().map(|(bytes, _)| bytes / 4).collect();
    let (barrier, slots) = (lens.len(), lens.len() + 1);
    lens.extend([1, ranks]);
    let options = Options { wire, exact_from: barrier as u32, ..Options::default() };
    let mut comm = Rank::connect(&config, &lens, &options)?;
    for (bucket, (bytes, calls)) in sizes.iter().enumerate() {
        let mut seconds = Vec::new();
        for _ in 0..=*calls {
            comm.reducer.bucket_mut(bucket).fill(1.0);
            comm.reducer.all_reduce(barrier)?;
            let start = Instant::now();
            comm.reducer.all_reduce(bucket)?;
            let time = start.elapsed().as_secs_f64();
            if comm.reducer.bucket(bucket).iter().any(|sum| *sum != ranks as f32) {
                return Err(format!("{bytes} bytes: got a wrong sum, expected {ranks}").into());
            }
            let times = comm.reducer.bucket_mut(slots);
            times.fill(0.0);
            times[rank] = time as f32;
            comm.reducer.all_reduce(slots)?;
            seconds.push(comm.reducer.bucket(slots).iter().fold(0.0, |most: f64, time| most.max((*time).into())));
        }
        // The first call touches memory for the first time.
        seconds.remove(0);
        if rank == 0 {
            println!("{}", serde_json::to_string(&Times { bytes: *bytes, seconds })?);
        }
    }
    Ok(comm.leave()?)
}
