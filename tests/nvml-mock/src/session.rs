//! The machine that is played, from `nvmlInit` to `nvmlShutdown`.

use crate::events::EventSet;
use crate::memory::{Answer, DRIVER_NOT_LOADED, GPU_IS_LOST, INVALID_ARGUMENT, UNINITIALIZED, UNKNOWN};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use switchyard_scenes::{Driver, FAILURES_FILE, Failures, Gpu, Machine, SCENE_FILE, Scene};

/// A device handle: the index of a GPU and 1, or [`FIRST_INSTANCE`] and the number of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Handle(pub usize);

impl Handle {
    /// The handle of a GPU.
    pub(crate) fn of(index: u32) -> Handle {
        Handle(index as usize + 1)
    }
}

/// Handles from here on are instances: 16 for each GPU.
const FIRST_INSTANCE: usize = 1 << 16;
pub(crate) const INSTANCES_PER_GPU: u32 = 16;

/// What is played.
pub(crate) struct Session {
    pub machine: Machine,
    pub failures: Failures,
    pub event_sets: BTreeMap<usize, EventSet>,
    folder: PathBuf,
    /// Which version of the file of failures was read.
    seen: Option<(u64, i64, i64)>,
    /// Calls of `nvmlInit` without one of `nvmlShutdown`.
    users: usize,
}

static SESSION: Mutex<Option<Session>> = Mutex::new(None);

fn lock() -> MutexGuard<'static, Option<Session>> {
    SESSION.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a call of an initialised library.
pub(crate) fn with<T>(call: impl FnOnce(&mut Session) -> Answer<T>) -> Answer<T> {
    let mut slot = lock();
    let session = slot.as_mut().ok_or(UNINITIALIZED)?;
    session.refresh();
    if session.failures.driver == Driver::Restarting {
        // Who used it before has to initialise it again.
        *slot = None;
        return Err(UNINITIALIZED);
    }
    call(session)
}

/// Runs a call about a GPU that can be reached.
pub(crate) fn with_gpu<T>(device: Handle, call: impl FnOnce(&Session, &Gpu) -> Answer<T>) -> Answer<T> {
    with(|session| {
        let gpu = session.gpu(device)?;
        call(session, gpu)
    })
}

impl Session {
    fn new(folder: PathBuf) -> Answer<Session> {
        let text = fs::read_to_string(folder.join(SCENE_FILE)).map_err(|_| UNKNOWN)?;
        let machine = Scene::parse(&text).and_then(Machine::new).map_err(|_| UNKNOWN)?;
        let (failures, event_sets) = (Failures::default(), BTreeMap::new());
        Ok(Session { machine, failures, event_sets, folder, seen: None, users: 0 })
    }

    fn refresh(&mut self) {
        let path = self.folder.join(FAILURES_FILE);
        let version = fs::metadata(&path).ok().map(|file| (file.ino(), file.mtime(), file.mtime_nsec()));
        if version != self.seen {
            self.seen = version;
            let text = fs::read_to_string(&path).ok();
            self.failures = text.and_then(|text| Failures::parse(&text).ok()).unwrap_or_default();
        }
    }

    /// The GPU of a handle, if it can be reached.
    pub(crate) fn gpu(&self, device: Handle) -> Answer<&Gpu> {
        let index = device.0.checked_sub(1).ok_or(INVALID_ARGUMENT)?;
        let gpu = self.machine.gpus.get(index).ok_or(INVALID_ARGUMENT)?;
        if self.failures.lost.contains(&gpu.index) { Err(GPU_IS_LOST) } else { Ok(gpu) }
    }

    /// The GPU, number and profile of an instance. `None`: the handle is not of an instance.
    pub(crate) fn instance(&self, device: Handle) -> Option<(&Gpu, u32, &str)> {
        let number = device.0.checked_sub(FIRST_INSTANCE)? as u32;
        let (gpu, number) = (number / INSTANCES_PER_GPU, number % INSTANCES_PER_GPU);
        let profile = self.machine.scene.mig.get(&gpu)?.get(number as usize)?;
        Some((self.machine.gpus.get(gpu as usize)?, number, profile))
    }

    /// The handle of an instance.
    pub(crate) fn handle_of_instance(gpu: &Gpu, number: u32) -> Handle {
        Handle(FIRST_INSTANCE + (gpu.index * INSTANCES_PER_GPU + number) as usize)
    }
}

/// `nvmlInit`.
pub(crate) fn start() -> Answer<()> {
    let mut slot = lock();
    let mut session = match slot.take() {
        Some(session) => session,
        None => Session::new(folder().ok_or(UNKNOWN)?)?,
    };
    session.refresh();
    if session.failures.driver == Driver::Restarting {
        return Err(DRIVER_NOT_LOADED);
    }
    session.users += 1;
    *slot = Some(session);
    Ok(())
}

/// `nvmlShutdown`.
pub(crate) fn stop() -> Answer<()> {
    let mut slot = lock();
    let session = slot.as_mut().ok_or(UNINITIALIZED)?;
    session.users -= 1;
    if session.users == 0 {
        *slot = None;
    }
    Ok(())
}

/// The folder of the file in which this function is, by the kernel's list of what is mapped where.
fn folder() -> Option<PathBuf> {
    let own = folder as *const () as usize;
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let is_own = |line: &&str| {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let hex = |text: &str| usize::from_str_radix(text, 16).ok();
        range.and_then(|(start, end)| Some((hex(start)?..hex(end)?).contains(&own))).unwrap_or(false)
    };
    let line = maps.lines().find(is_own)?;
    Path::new(&line[line.find('/')?..]).parent().map(Path::to_owned)
}
