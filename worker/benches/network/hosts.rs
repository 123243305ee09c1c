//! Hosts behind a switch: network namespaces whose links have a rate.

use super::Outcome;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

/// Bytes that a link passes at once before the rate counts. Short messages can be faster than the
/// rate. TCP hands over up to 64 KiB at a time.
const BURST_SECONDS: f64 = 1e-3;
const LEAST_BURST: u64 = 128 << 10;
/// Seconds after which a process is killed: a peer can hang when another fails.
const LIMIT: &str = "300";

/// Namespaces that end on drop, or with this process.
pub struct Hosts {
    switch: Namespace,
    hosts: Vec<Namespace>,
    /// Cores of this machine; assigned to hosts round-robin.
    pub cores: Vec<usize>,
    /// Rate of each link and direction.
    pub bits_per_second: u64,
}

struct Namespace(Child);

impl Namespace {
    /// Runs `script` in a new namespace. The shell becomes `cat`, which ends with its input, so
    /// nothing is left when this process is killed.
    fn start(script: &str) -> Outcome<Namespace> {
        let script = format!("set -e\nip link set lo up\n{script}\necho ready\nexec cat >/dev/null");
        let mut command = Command::new("unshare");
        command.args(["--net", "sh", "-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("cannot start unshare: {error}"))?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut line)?;
        if line.trim() != "ready" {
            let _ = child.wait();
            return Err("cannot make a network namespace; expected root, iproute2 and the qdisc tbf".into());
        }
        Ok(Namespace(child))
    }

    fn path(&self) -> String {
        format!("/proc/{}/ns/net", self.0.id())
    }

    fn shell(&self, script: &str) -> Outcome<()> {
        let net = format!("--net={}", self.path());
        let status = Command::new("nsenter").args([&net, "--", "sh", "-ec", script]).status()?;
        if status.success() { Ok(()) } else { Err(format!("{status}: {script}").into()) }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Hosts {
    /// Starts `count` hosts; each link has the rate in each direction.
    pub fn start(count: usize, bits_per_second: u64) -> Outcome<Hosts> {
        let set = rustix::thread::sched_getaffinity(None)?;
        let cores = (0..rustix::thread::CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect();
        let switch = Namespace::start("ip link add switch type bridge\nip link set switch up")?;
        let mut hosts = Hosts { switch, hosts: Vec::new(), cores, bits_per_second };
        for index in 0..count {
            let host = Namespace::start("")?;
            hosts.switch.shell(&format!(
                "ip link add port-{index} type veth peer name eth0 netns {}\nip link set port-{index} master switch up",
                host.0.id()
            ))?;
            host.shell(&format!("ip addr add {}/24 dev eth0\nip link set eth0 up", Hosts::address(index)))?;
            hosts.hosts.push(host);
            hosts.limit(index, bits_per_second)?;
        }
        Ok(hosts)
    }

    /// Limits a host's link in both directions.
    pub fn limit(&self, host: usize, bits_per_second: u64) -> Outcome<()> {
        let burst = LEAST_BURST.max((bits_per_second as f64 / 8.0 * BURST_SECONDS) as u64);
        let shape = |port: &str| {
            format!("tc qdisc replace dev {port} root tbf rate {bits_per_second}bit burst {burst} limit {}", 8 * burst)
        };
        self.switch.shell(&shape(&format!("port-{host}")))?;
        self.hosts[host].shell(&shape("eth0"))
    }

    pub fn len(&self) -> usize {
        self.hosts.len()
    }

    pub fn address(host: usize) -> String {
        format!("10.77.0.{}", host + 1)
    }

    /// A program on a host, pinned to its core.
    pub fn command(&self, host: usize, program: &str) -> Command {
        let net = format!("--net={}", self.hosts[host].path());
        let core = self.cores[host % self.cores.len()].to_string();
        let mut command = Command::new("nsenter");
        // `timeout` passes the signal on when this process dies.
        command.args([&net, "--", "setpriv", "--pdeathsig", "TERM", "timeout", "--kill-after=5", LIMIT]);
        command.args(["taskset", "--cpu-list", &core, program]);
        command
    }

    /// Path of a host's namespace.
    pub fn namespace(&self, host: usize) -> String {
        self.hosts[host].path()
    }

    /// Bytes that a host has sent, headers included.
    pub fn sent(&self, host: usize) -> Outcome<u64> {
        let path = format!("/proc/{}/net/dev", self.hosts[host].0.id());
        let text = std::fs::read_to_string(&path)?;
        let line = text.lines().find_map(|line| line.trim().strip_prefix("eth0:"));
        let field = line.and_then(|line| line.split_whitespace().nth(8));
        Ok(field.ok_or_else(|| format!("{path}: got no line of eth0"))?.parse()?)
    }
}

/// Waits for all processes; returns the standard output of the first. The others are killed if one
/// fails.
pub fn wait_all(mut children: Vec<Child>) -> Outcome<String> {
    let output = children[0].stdout.take();
    let mut text = String::new();
    if let Some(mut output) = output {
        std::io::Read::read_to_string(&mut output, &mut text)?;
    }
    let mut failed = None;
    for (index, child) in children.iter_mut().enumerate() {
        if failed.is_some() {
            let _ = child.kill();
        }
        let status = child.wait()?;
        if !status.success() && failed.is_none() {
            failed = Some(format!("the process of host {index} failed: {status}"));
        }
    }
    match failed {
        Some(failed) => Err(failed.into()),
        None => Ok(text),
    }
}
