//! A test-controlled network between the pods of a job: all connections pass through proxies, which
//! can reset, delay or throttle them.
//!
//! Every other rank reaches rank 0 through its own proxy. Over these connections ranks announce the
//! addresses where they listen for data, when they gather what each says about its reductions. The
//! addresses in these frames are replaced by proxies' addresses of the same length, so that nothing
//! else changes.
#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a test helper may end the test")]

use rustix::net::sockopt::set_socket_linger;
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Where rank 0 and all proxies listen.
const HOST: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
/// Length of a frame's header, and the positions of the kind and of the remaining length in it.
const HEADER: usize = 32;
const KIND: usize = 5;
const LENGTH: std::ops::Range<usize> = 20..28;
/// Kind of the frames in which a rank sends a value to all; the reply holds the values of all
/// ranks, in order.
const ALL_GATHER: u8 = 18;
/// The text before an address in these frames.
const DATA: &[u8] = b"\"data\":\"";
/// How often a proxy checks for a connection.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The traffic of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Traffic {
    /// Membership and failures: between a rank and rank 0.
    Control,
    /// Gradients: from a rank to another.
    Data,
}

/// A proxied connection: the rank that made it, and the one that accepted it.
#[derive(Clone)]
struct Link {
    ends: [usize; 2],
    traffic: Traffic,
    streams: Arc<[TcpStream; 2]>,
    /// Set to end it with a reset instead of an end of stream.
    reset: Arc<AtomicBool>,
}

struct Shared {
    /// Partitioned ranks.
    cut: Vec<AtomicBool>,
    /// Delay in microseconds per chunk of at most 16 KiB, by rank.
    slow: Vec<AtomicU64>,
    links: Mutex<Vec<Link>>,
    /// Proxies for ranks' listeners, by the rank that connects and the address.
    proxies: Mutex<HashMap<(usize, SocketAddr), SocketAddr>>,
    /// Bytes forwarded so far.
    passed: AtomicU64,
    /// Chunks delayed so far.
    delayed: AtomicU64,
    over: AtomicBool,
}

/// The network of an attempt.
pub struct Network {
    shared: Arc<Shared>,
    proxies: Vec<SocketAddr>,
}

impl Network {
    /// For `world` ranks, the first of which listens on this port of 127.0.0.2.
    pub fn new(world: usize, port: u16) -> Network {
        let shared = Arc::new(Shared {
            cut: (0..world).map(|_| AtomicBool::default()).collect(),
            slow: (0..world).map(|_| AtomicU64::default()).collect(),
            links: Mutex::default(),
            proxies: Mutex::default(),
            passed: AtomicU64::new(0),
            delayed: AtomicU64::new(0),
            over: AtomicBool::new(false),
        });
        let zero = SocketAddr::from((HOST, port));
        let proxies = (0..world).map(|rank| shared.open([rank, 0], Traffic::Control, zero)).collect();
        Network { shared, proxies }
    }

    /// Where this rank reaches rank 0.
    pub fn rendezvous(&self, rank: usize) -> SocketAddr {
        self.proxies[rank]
    }

    /// Resets the connections of this kind that a rank has made; returns the rank at the other end
    /// of each.
    pub fn reset(&self, rank: usize, traffic: Traffic) -> Vec<usize> {
        let mut links = self.shared.links();
        let mut others = Vec::new();
        links.retain(|link| {
            let chosen = link.ends[0] == rank && link.traffic == traffic;
            if chosen {
                others.push(link.ends[1]);
                link.reset.store(true, Ordering::SeqCst);
                for stream in &*link.streams {
                    // With this linger setting, closing the last handle sends a reset, and the
                    // threads that hold the others wake up.
                    let _ = set_socket_linger(stream, Some(Duration::ZERO));
                    let _ = stream.shutdown(Shutdown::Read);
                }
            }
            !chosen
        });
        others
    }

    /// Starts or ends a partition, which blocks everything to or from a rank, including the end of
    /// a connection.
    pub fn cut(&self, rank: usize, on: bool) {
        self.shared.cut[rank].store(on, Ordering::SeqCst);
    }

    /// Delays each chunk to or from a rank by this time.
    pub fn slow(&self, rank: usize, delay: Duration) {
        self.shared.slow[rank].store(delay.as_micros() as u64, Ordering::SeqCst);
    }

    /// Bytes forwarded so far.
    pub fn passed(&self) -> u64 {
        self.shared.passed.load(Ordering::SeqCst)
    }

    /// Chunks delayed so far.
    pub fn delayed(&self) -> u64 {
        self.shared.delayed.load(Ordering::SeqCst)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::SeqCst);
        for link in self.shared.links().drain(..) {
            link.streams.iter().for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
        }
    }
}

impl Shared {
    fn links(&self) -> std::sync::MutexGuard<'_, Vec<Link>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a proxy for this address.
    fn open(self: &Arc<Self>, ends: [usize; 2], traffic: Traffic, to: SocketAddr) -> SocketAddr {
        let listener = TcpListener::bind((HOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        listener.set_nonblocking(true).unwrap();
        let shared = Arc::clone(self);
        thread::spawn(move || {
            while !shared.over.load(Ordering::SeqCst) {
                match listener.accept() {
                    Ok((from, _)) => drop(shared.join(ends, traffic, from, to)),
                    Err(_) => thread::sleep(POLL_INTERVAL),
                }
            }
        });
        address
    }

    /// Connects the two sides, if the target listens.
    fn join(self: &Arc<Self>, ends: [usize; 2], traffic: Traffic, from: TcpStream, to: SocketAddr) -> io::Result<()> {
        from.set_nonblocking(false)?;
        let streams = [from, TcpStream::connect(to)?];
        for stream in &streams {
            stream.set_nodelay(true)?;
        }
        let link = Link { ends, traffic, streams: Arc::new(streams), reset: Arc::default() };
        self.links().push(link.clone());
        for (from, to) in [(0, 1), (1, 0)] {
            let (shared, link) = (Arc::clone(self), link.clone());
            thread::spawn(move || {
                let _ = shared.pass(&link, &link.streams[from], &link.streams[to]);
                while shared.is_cut(ends) {
                    thread::sleep(POLL_INTERVAL);
                }
                if !link.reset.load(Ordering::SeqCst) {
                    let _ = link.streams[to].shutdown(Shutdown::Write);
                }
            });
        }
        Ok(())
    }

    fn is_cut(&self, ends: [usize; 2]) -> bool {
        ends.into_iter().any(|rank| self.cut[rank].load(Ordering::SeqCst)) && !self.over.load(Ordering::SeqCst)
    }

    /// Forwards bytes until the end of the stream.
    fn pass(self: &Arc<Self>, link: &Link, mut from: &TcpStream, mut to: &TcpStream) -> io::Result<()> {
        let mut bytes = vec![0; 16 << 10];
        loop {
            let piece = match link.traffic {
                Traffic::Control => self.frame(link.ends[0], from)?,
                Traffic::Data => {
                    let read = from.read(&mut bytes)?;
                    bytes[..read].to_vec()
                }
            };
            if piece.is_empty() || link.reset.load(Ordering::SeqCst) {
                return Ok(());
            }
            let delay = link.ends.into_iter().map(|rank| self.slow[rank].load(Ordering::SeqCst)).max().unwrap_or(0);
            if delay > 0 {
                thread::sleep(Duration::from_micros(delay));
                self.delayed.fetch_add(1, Ordering::SeqCst);
            }
            while self.is_cut(link.ends) {
                thread::sleep(POLL_INTERVAL);
            }
            to.write_all(&piece)?;
            self.passed.fetch_add(piece.len() as u64, Ordering::SeqCst);
        }
    }

    /// Forwards a frame of `rank`'s control connection with its addresses replaced: rank 0 reads
    /// those in a request, `rank` those in a reply.
    fn frame(self: &Arc<Self>, rank: usize, mut from: &TcpStream) -> io::Result<Vec<u8>> {
        let mut frame = vec![0; HEADER];
        from.read_exact(&mut frame)?;
        let length = u64::from_le_bytes(frame[LENGTH].try_into().unwrap());
        frame.resize(HEADER + length as usize, 0);
        from.read_exact(&mut frame[HEADER..])?;
        let (reader, mut owner) = if frame[KIND] == ALL_GATHER { (0, rank) } else { (rank, 0) };
        let mut at = HEADER;
        while let Some(found) = frame[at..].windows(DATA.len()).position(|bytes| bytes == DATA) {
            let start = at + found + DATA.len();
            let end = start + frame[start..].iter().position(|byte| *byte == b'"').unwrap();
            let announced: SocketAddr = std::str::from_utf8(&frame[start..end]).unwrap().parse().unwrap();
            let proxy = self.proxy([reader, owner], announced).to_string();
            assert_eq!(proxy.len(), end - start, "{announced} becomes {proxy}");
            frame[start..end].copy_from_slice(proxy.as_bytes());
            (at, owner) = (end, owner + 1);
        }
        Ok(frame)
    }

    /// The proxy through which the first of two ranks reaches the second one's listener, or the
    /// proxy that rank 0 uses for it.
    fn proxy(self: &Arc<Self>, ends: [usize; 2], announced: SocketAddr) -> SocketAddr {
        let mut proxies = self.proxies.lock().unwrap_or_else(PoisonError::into_inner);
        let original = proxies.iter().find_map(|((_, listener), proxy)| (*proxy == announced).then_some(*listener));
        let listener = original.unwrap_or(announced);
        *proxies.entry((ends[0], listener)).or_insert_with(|| self.open(ends, Traffic::Data, listener))
    }
}
