//! An in-memory disk. It counts mutating calls, fails at one of them, and can lose power: then any
//! subset of unsynced changes may be lost, in any order, down to blocks of 512 bytes.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use switchyard_checkpoint::disk::{Kind, ReadFile, Vfs, WriteFile};

const BLOCK: usize = 512;

/// Deterministic random numbers (splitmix64).
#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    fn coin(&mut self) -> bool {
        self.next() & 1 == 1
    }
}

/// A change of directory entries that is not durable yet.
#[derive(Clone)]
enum Change {
    Set(String, usize),
    Unset(String),
}

#[derive(Clone)]
enum Node {
    /// The content that programs see, and the durable content.
    File {
        now: Vec<u8>,
        safe: Vec<u8>,
    },
    Directory {
        now: BTreeMap<String, usize>,
        safe: BTreeMap<String, usize>,
        pending: Vec<Change>,
    },
}

fn directory() -> Node {
    Node::Directory { now: BTreeMap::new(), safe: BTreeMap::new(), pending: Vec::new() }
}

/// Injected fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Power is lost during the n-th mutating call.
    PowerOff(usize),
    /// From the n-th write on, all writes fail with this error.
    Writes(usize, ErrorKind),
    /// The n-th mutating call fails with this error; the next one succeeds.
    Call(usize, ErrorKind),
}

struct Inner {
    nodes: Vec<Node>,
    fault: Option<Fault>,
    calls: usize,
    writes: usize,
    is_off: bool,
    random: Random,
}

#[derive(Clone)]
pub struct MemoryDisk(Arc<Mutex<Inner>>);

/// How a mutating call proceeds.
enum Outcome {
    Go,
    /// Apply it, or a prefix of it, and fail.
    Partly(io::Error),
    Fail(io::Error),
}

impl Inner {
    fn alive(&self) -> io::Result<()> {
        if self.is_off { Err(io::Error::other("the machine is off")) } else { Ok(()) }
    }

    /// Counts a mutating call.
    fn change(&mut self, is_write: bool) -> Outcome {
        if let Err(error) = self.alive() {
            return Outcome::Fail(error);
        }
        self.calls += 1;
        self.writes += usize::from(is_write);
        match self.fault {
            Some(Fault::PowerOff(at)) if self.calls == at => {
                self.is_off = true;
                let error = io::Error::other("power off");
                if self.random.coin() { Outcome::Partly(error) } else { Outcome::Fail(error) }
            }
            Some(Fault::Writes(from, kind)) if is_write && self.writes >= from => Outcome::Partly(kind.into()),
            Some(Fault::Call(at, kind)) if self.calls == at => Outcome::Fail(kind.into()),
            _ => Outcome::Go,
        }
    }

    fn find(&self, path: &Path) -> io::Result<usize> {
        self.alive()?;
        let names = path.components().filter_map(|part| match part {
            std::path::Component::Normal(name) => name.to_str(),
            _ => None,
        });
        names.into_iter().try_fold(0, |node, name| match &self.nodes[node] {
            Node::Directory { now, .. } => now.get(name).copied().ok_or(ErrorKind::NotFound.into()),
            Node::File { .. } => Err(ErrorKind::NotADirectory.into()),
        })
    }

    fn names(&mut self, path: &Path) -> io::Result<(&mut BTreeMap<String, usize>, &mut Vec<Change>)> {
        let node = self.find(path)?;
        match &mut self.nodes[node] {
            Node::Directory { now, pending, .. } => Ok((now, pending)),
            Node::File { .. } => Err(ErrorKind::NotADirectory.into()),
        }
    }

    fn set(&mut self, path: &Path, node: usize) -> io::Result<()> {
        let (parent, name) = split(path);
        let (now, pending) = self.names(parent)?;
        now.insert(name.clone(), node);
        pending.push(Change::Set(name, node));
        Ok(())
    }

    fn unset(&mut self, path: &Path) -> io::Result<usize> {
        let (parent, name) = split(path);
        let (now, pending) = self.names(parent)?;
        let node = now.remove(&name).ok_or(ErrorKind::NotFound)?;
        pending.push(Change::Unset(name));
        Ok(node)
    }
}

fn split(path: &Path) -> (&Path, String) {
    (path.parent().unwrap(), path.file_name().unwrap().to_str().unwrap().to_string())
}

impl MemoryDisk {
    pub fn new(fault: Option<Fault>) -> MemoryDisk {
        let inner = Inner { nodes: vec![directory()], fault, calls: 0, writes: 0, is_off: false, random: Random(1) };
        MemoryDisk(Arc::new(Mutex::new(inner)))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap()
    }

    /// Number of mutating calls, and how many of them were writes.
    pub fn counts(&self) -> (usize, usize) {
        let inner = self.inner();
        (inner.calls, inner.writes)
    }

    pub fn is_off(&self) -> bool {
        self.inner().is_off
    }

    /// Clears the fault, for example after space was freed.
    pub fn repair(&self) {
        self.inner().fault = None;
    }

    /// One of the many possible disk contents after power loss.
    pub fn after_power_off(&self, seed: u64) -> MemoryDisk {
        let mut random = Random(seed);
        let survives = |node: &Node| match node {
            Node::File { now, safe } => {
                let (short, long) = (now.len().min(safe.len()), now.len().max(safe.len()));
                let length = match random.below(3) {
                    0 => safe.len(),
                    1 => now.len(),
                    _ => short + random.below(long - short + 1),
                };
                let mut bytes = safe.clone();
                bytes.resize(length, 0);
                for (start, block) in (0..).step_by(BLOCK).zip(bytes.chunks_mut(BLOCK)) {
                    let end = now.len().min(start + block.len());
                    if start < end && random.coin() {
                        block[..end - start].copy_from_slice(&now[start..end]);
                    }
                }
                Node::File { now: bytes.clone(), safe: bytes }
            }
            Node::Directory { safe, pending, .. } => {
                let mut names = safe.clone();
                let mut changes: Vec<Change> = pending.iter().filter(|_| random.coin()).cloned().collect();
                // Half of the time in order, as with a journal.
                if random.coin() {
                    (1..changes.len()).rev().for_each(|i| changes.swap(i, random.below(i + 1)));
                }
                for change in changes {
                    match change {
                        Change::Set(name, node) => drop(names.insert(name, node)),
                        Change::Unset(name) => drop(names.remove(&name)),
                    }
                }
                Node::Directory { now: names.clone(), safe: names, pending: Vec::new() }
            }
        };
        let nodes = self.inner().nodes.iter().map(survives).collect();
        let inner = Inner { nodes, fault: None, calls: 0, writes: 0, is_off: false, random: Random(seed) };
        MemoryDisk(Arc::new(Mutex::new(inner)))
    }
}

struct Writing {
    disk: MemoryDisk,
    node: usize,
}

impl WriteFile for Writing {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut inner = self.disk.inner();
        let verdict = inner.change(true);
        let part = inner.random.below(bytes.len() + 1);
        let (bytes, result) = match verdict {
            Outcome::Go => (bytes, Ok(())),
            Outcome::Partly(error) => (&bytes[..part], Err(error)),
            Outcome::Fail(error) => return Err(error),
        };
        if let Node::File { now, .. } = &mut inner.nodes[self.node] {
            now.extend_from_slice(bytes);
        }
        result
    }

    fn sync(&mut self) -> io::Result<()> {
        let mut inner = self.disk.inner();
        let result = match inner.change(false) {
            Outcome::Go => Ok(()),
            Outcome::Partly(error) => Err(error),
            Outcome::Fail(error) => return Err(error),
        };
        if let Node::File { now, safe } = &mut inner.nodes[self.node] {
            safe.clone_from(now);
        }
        result
    }
}

struct Reading(Vec<u8>);

impl ReadFile for Reading {
    fn length(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let start = offset as usize;
        let from = self.0.get(start..start + bytes.len()).ok_or(ErrorKind::UnexpectedEof)?;
        bytes.copy_from_slice(from);
        Ok(())
    }
}

impl MemoryDisk {
    /// A change of names: applied, applied but reported as failed, or not applied.
    fn changes<T>(&self, change: impl FnOnce(&mut Inner) -> io::Result<T>) -> io::Result<T> {
        let mut inner = self.inner();
        match inner.change(false) {
            Outcome::Go => change(&mut inner),
            Outcome::Partly(error) => {
                // The machine is already off, but this call still reaches the disk.
                inner.is_off = false;
                let _ = change(&mut inner);
                inner.is_off = true;
                Err(error)
            }
            Outcome::Fail(error) => Err(error),
        }
    }
}

impl Vfs for MemoryDisk {
    fn create_directory(&self, path: &Path) -> io::Result<()> {
        self.changes(|inner| {
            if inner.find(path).is_ok() {
                return Err(ErrorKind::AlreadyExists.into());
            }
            let node = inner.nodes.len();
            inner.set(path, node)?;
            inner.nodes.push(directory());
            Ok(())
        })
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn WriteFile>> {
        let node = self.changes(|inner| match inner.find(path) {
            Ok(node) => match &mut inner.nodes[node] {
                Node::File { now, .. } => {
                    now.clear();
                    Ok(node)
                }
                Node::Directory { .. } => Err(ErrorKind::IsADirectory.into()),
            },
            Err(_) => {
                let node = inner.nodes.len();
                inner.set(path, node)?;
                inner.nodes.push(Node::File { now: Vec::new(), safe: Vec::new() });
                Ok(node)
            }
        })?;
        Ok(Box::new(Writing { disk: self.clone(), node }))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn ReadFile>> {
        let inner = self.inner();
        match &inner.nodes[inner.find(path)?] {
            Node::File { now, .. } => Ok(Box::new(Reading(now.clone()))),
            Node::Directory { .. } => Err(ErrorKind::IsADirectory.into()),
        }
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.changes(|inner| {
            let node = inner.unset(from)?;
            inner.set(to, node)
        })
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        self.changes(|inner| {
            let node = inner.find(path)?;
            match &mut inner.nodes[node] {
                Node::Directory { now, safe, pending } => {
                    safe.clone_from(now);
                    pending.clear();
                    Ok(())
                }
                Node::File { .. } => Err(ErrorKind::NotADirectory.into()),
            }
        })
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.changes(|inner| inner.unset(path).map(drop))
    }

    fn remove_directory(&self, path: &Path) -> io::Result<()> {
        self.changes(|inner| {
            if !inner.names(path)?.0.is_empty() {
                return Err(ErrorKind::DirectoryNotEmpty.into());
            }
            inner.unset(path).map(drop)
        })
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        Ok(self.inner().names(path)?.0.keys().cloned().collect())
    }

    fn kind(&self, path: &Path) -> io::Result<Kind> {
        let inner = self.inner();
        match &inner.nodes[inner.find(path)?] {
            Node::File { .. } => Ok(Kind::File),
            Node::Directory { .. } => Ok(Kind::Directory),
        }
    }

    fn available(&self, _: &Path) -> io::Result<Option<u64>> {
        Ok(None)
    }
}
