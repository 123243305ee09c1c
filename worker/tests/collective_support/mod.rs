//! Helpers shared by the collective tests: groups of threads and groups of processes.
#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a test helper may end the test")]

mod rank;

pub use rank::Rank;
use std::{
    net::TcpListener,
    process::{Child, Command, Stdio},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU16, Ordering},
    },
    time::{Duration, Instant},
};
use switchyard_worker::comm::{CommError, Force, GroupConfig, Options, Token};

pub const TOKEN: [u8; 32] = [42; 32];

/// Serialises tests that measure time, CPU usage or open files of this process.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A free loopback port, from below the ephemeral range, so that no other process can take it in
/// the meantime.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let offset = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 20_000 + ((std::process::id() as u16 % 97) * 100 + offset) % 10_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Bound of every wait, which only a hang reaches.
pub const TIMEOUT: Duration = Duration::from_secs(600);

pub fn config(rank: u32, world: u32, port: u16) -> GroupConfig {
    GroupConfig {
        job: "test".to_owned(),
        attempt: 1,
        node_rank: rank,
        num_nodes: world,
        procs_per_node: 1,
        local_rank: 0,
        servers: 0,
        server: None,
        rendezvous: format!("127.0.0.1:{port}"),
        key: Token::new(TOKEN),
        transport: Force::Auto,
        host_id: String::new(),
        peer_timeout: TIMEOUT,
        connect_timeout: TIMEOUT,
    }
}

/// Runs one thread per rank; returns their results in rank order.
pub fn group<T: Send>(
    world: u32,
    change: impl Fn(&mut GroupConfig) + Sync,
    lens: &[usize],
    body: impl Fn(Rank) -> T + Sync,
) -> Vec<T> {
    try_group(world, change, lens, |comm| body(comm.unwrap()))
}

pub fn try_group<T: Send>(
    world: u32,
    change: impl Fn(&mut GroupConfig) + Sync,
    lens: &[usize],
    body: impl Fn(Result<Rank, CommError>) -> T + Sync,
) -> Vec<T> {
    try_group_with(world, |_| Options::default(), change, lens, body)
}

/// Like [`group`], with options.
pub fn group_with<T: Send>(
    world: u32,
    options: Options,
    change: impl Fn(&mut GroupConfig) + Sync,
    lens: &[usize],
    body: impl Fn(Rank) -> T + Sync,
) -> Vec<T> {
    try_group_with(world, |_| options, change, lens, |comm| body(comm.unwrap()))
}

/// Like [`try_group`], with options per rank.
pub fn try_group_with<T: Send>(
    world: u32,
    options: impl Fn(u32) -> Options + Sync,
    change: impl Fn(&mut GroupConfig) + Sync,
    lens: &[usize],
    body: impl Fn(Result<Rank, CommError>) -> T + Sync,
) -> Vec<T> {
    let port = free_port();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                let (options, change, body) = (&options, &change, &body);
                scope.spawn(move || {
                    let mut config = config(rank, world, port);
                    change(&mut config);
                    body(Rank::connect(&config, lens, &options(rank)))
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Deterministic test value of mixed sign and magnitude.
pub fn number(rank: u32, round: u32, i: usize) -> f32 {
    let x = (i as u32).wrapping_mul(2_654_435_761) ^ rank.wrapping_mul(40_503) ^ round.wrapping_mul(0x9e37_79b9);
    let x = x.wrapping_mul(0x85eb_ca6b) ^ (x >> 13);
    (x >> 8) as f32 / 65_536.0 - 128.0
}

/// Starts a rank in its own process: this test binary again, running only the test `entry`.
pub fn spawn_rank(entry: &str, rank: u32, world: u32, port: u16, extra: &[(&str, &str)]) -> Child {
    spawn_rank_with(Stdio::null(), entry, rank, world, port, extra)
}

pub fn spawn_rank_with(stdin: Stdio, entry: &str, rank: u32, world: u32, port: u16, extra: &[(&str, &str)]) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", entry, "--nocapture", "--test-threads=1", "-q"]);
    command.env("TEST_RANK", rank.to_string()).env("TEST_WORLD", world.to_string()).env("TEST_PORT", port.to_string());
    command.envs(extra.iter().copied()).stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::inherit());
    command.spawn().unwrap()
}

/// In a rank process, its configuration; `None` in the test runner itself.
pub fn rank_process() -> Option<GroupConfig> {
    let get = |name: &str| std::env::var(name).ok()?.parse::<u32>().ok();
    let mut config = config(get("TEST_RANK")?, get("TEST_WORLD")?, get("TEST_PORT")? as u16);
    if let Ok(ms) = std::env::var("TEST_PEER_TIMEOUT_MS") {
        config.peer_timeout = Duration::from_millis(ms.parse().unwrap());
    }
    if let Ok(transport) = std::env::var("TEST_TRANSPORT") {
        config.transport = if transport == "tcp" { Force::Tcp } else { Force::Auto };
    }
    Some(config)
}

/// In a rank process, its options.
pub fn rank_options() -> Options {
    let lanes = std::env::var("TEST_LANES").map_or(1, |lanes| lanes.parse().unwrap());
    Options { lanes, ..Options::default() }
}

/// Open sockets, memfds and eventfds of this process.
pub fn open_handles() -> Vec<String> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        if let Ok(target) = std::fs::read_link(entry.path()) {
            let text = target.display().to_string();
            if text.starts_with("socket:") || text.contains("memfd") || text.contains("eventfd") {
                all.push(text);
            }
        }
    }
    all.sort();
    all
}

pub fn mappings_of_buckets() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().matches("switchyard-buckets").count()
}

pub fn wait_until(mut ready: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() < TIMEOUT {
        if ready() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    ready()
}
