//! Loads GPU programs: their machine code comes from the cache, or is compiled.

use super::cache::Cache;
use crate::recorder::Recorder;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use switchyard_cuda::Error;
use switchyard_cuda::driver::{Context, Loaded};
use switchyard_cuda::kernels::Program;
use switchyard_cuda::nvrtc::Nvrtc;

/// Compiles and loads programs on several threads.
pub(super) struct Compiler<'a> {
    context: &'a Context,
    nvrtc: &'a Nvrtc,
    cache: &'a Cache,
    /// Everything that machine code depends on besides its program.
    key: String,
    compiled: AtomicU64,
    loaded: Arc<AtomicU64>,
}

impl<'a> Compiler<'a> {
    /// `device`: device part of the cache key.
    ///
    /// # Errors
    /// The compiler version cannot be read.
    pub fn new(
        (context, nvrtc): (&'a Context, &'a Nvrtc),
        (cache, device): (&'a Cache, &str),
        recorder: &Recorder,
    ) -> Result<Compiler<'a>, Error> {
        let loaded = Arc::new(AtomicU64::new(0));
        recorder.add_counter({
            let loaded = Arc::clone(&loaded);
            move || loaded.load(Ordering::Relaxed)
        });
        let (major, minor) = nvrtc.version()?;
        let key = format!("{device}, NVRTC {major}.{minor}");
        Ok(Compiler { context, nvrtc, cache, key, compiled: AtomicU64::new(0), loaded })
    }

    /// Loads programs, `threads` at a time.
    ///
    /// # Errors
    /// A program cannot be compiled or loaded.
    pub fn load(&self, programs: &[&Program], threads: usize) -> Result<Vec<Loaded>, Error> {
        let next = AtomicUsize::new(0);
        let load = || -> Result<Vec<Loaded>, Error> {
            let mut own = Vec::new();
            while let Some(program) = programs.get(next.fetch_add(1, Ordering::Relaxed)) {
                own.push(self.load_one(program)?);
                self.loaded.fetch_add(1, Ordering::Relaxed);
            }
            Ok(own)
        };
        let loaded = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads.clamp(1, programs.len().max(1))).map(|_| scope.spawn(load)).collect();
            let ended = threads.into_iter().map(|thread| thread.join().expect("invariant: compiling does not panic"));
            ended.collect::<Result<Vec<_>, Error>>()
        })?;
        Ok(loaded.into_iter().flatten().collect())
    }

    /// Number of programs compiled.
    pub fn compiled(&self) -> u64 {
        self.compiled.load(Ordering::Relaxed)
    }

    fn load_one(&self, program: &Program) -> Result<Loaded, Error> {
        let architecture = self.context.device().architecture();
        let key = format!("{}\n{}", self.key, program.identity(&architecture));
        let kept = self.cache.get(&key).and_then(|code| self.context.load_code(program.clone(), &code).ok());
        if let Some(loaded) = kept {
            return Ok(loaded);
        }
        let code = program.compile(self.nvrtc, &architecture)?.cubin;
        let loaded = self.context.load_code(program.clone(), &code)?;
        self.compiled.fetch_add(1, Ordering::Relaxed);
        self.cache.put(&key, &code);
        Ok(loaded)
    }
}
