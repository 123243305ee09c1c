//! Streams and events.

use super::{Kind, Pointer, done, handle, index, store, stream, with};
use crate::code::{CallResult, INVALID_HANDLE, INVALID_VALUE, NOT_READY, NOT_SUPPORTED};
use crate::gpu::queue::DEFAULT;
use crate::gpu::{Event, Gpu};

const NON_BLOCKING: u32 = 1;
const DISABLE_TIMING: u32 = 2;
const EXTERNAL: u32 = 1;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(raw: *mut Pointer, flags: u32) -> i32 {
    done(with(|gpu| {
        if flags > NON_BLOCKING {
            return Err(INVALID_VALUE);
        }
        let stream = gpu.queue.create(flags != NON_BLOCKING);
        // SAFETY: per the header's contract.
        unsafe { store(raw, handle(Kind::Stream, stream)) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamDestroy_v2(raw: Pointer) -> i32 {
    done(with(|gpu| {
        let stream = stream(gpu, raw)?;
        if stream == DEFAULT {
            return Err(INVALID_HANDLE);
        }
        gpu.queue.destroy(stream);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamSynchronize(raw: Pointer) -> i32 {
    done(with(|gpu| {
        let stream = stream(gpu, raw)?;
        let now = gpu.queue.now(stream);
        gpu.synchronize(&now)
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWaitEvent(raw: Pointer, event: Pointer, flags: u32) -> i32 {
    done(with(|gpu| {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let stream = stream(gpu, raw)?;
        gpu.graphs.refuse_for(stream, "cuStreamWaitEvent")?;
        if let Some(clock) = of(gpu, event)?.clock.clone() {
            gpu.queue.wait(stream, &clock);
        }
        Ok(())
    }))
}

fn of(gpu: &mut Gpu, raw: Pointer) -> CallResult<&mut Event> {
    let index = index(Kind::Event, raw)?;
    gpu.events.get_mut(index).and_then(Option::as_mut).ok_or(INVALID_HANDLE)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(raw: *mut Pointer, flags: u32) -> i32 {
    done(with(|gpu| {
        gpu.events.push(Some(Event { clock: None, has_time: flags & DISABLE_TIMING == 0 }));
        // SAFETY: per the header's contract.
        unsafe { store(raw, handle(Kind::Event, gpu.events.len() - 1)) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventDestroy_v2(raw: Pointer) -> i32 {
    done(with(|gpu| {
        of(gpu, raw)?;
        gpu.events[index(Kind::Event, raw)?] = None;
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecord(event: Pointer, raw: Pointer) -> i32 {
    done(with(|gpu| {
        let stream = stream(gpu, raw)?;
        gpu.graphs.refuse_for(stream, "cuEventRecord")?;
        of(gpu, event)?;
        gpu.record(index(Kind::Event, event)?, stream);
        Ok(())
    }))
}

/// On a captured stream: each launch of the graph records the event.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecordWithFlags(event: Pointer, raw: Pointer, flags: u32) -> i32 {
    done(with(|gpu| {
        if flags != EXTERNAL {
            return Err(NOT_SUPPORTED);
        }
        let stream = stream(gpu, raw)?;
        of(gpu, event)?;
        gpu.graphs.take_record(stream, index(Kind::Event, event)?)
    }))
}

/// A query makes progress: each one runs an operation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventQuery(raw: Pointer) -> i32 {
    done(with(|gpu| match of(gpu, raw)?.clock.clone() {
        Some(clock) if !gpu.advance(&clock)? => Err(NOT_READY),
        _ => Ok(()),
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventSynchronize(raw: Pointer) -> i32 {
    done(with(|gpu| match of(gpu, raw)?.clock.clone() {
        Some(clock) => gpu.synchronize(&clock),
        None => Ok(()),
    }))
}

/// One microsecond per operation in between.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(milliseconds: *mut f32, start: Pointer, end: Pointer) -> i32 {
    done(with(|gpu| {
        let mut clock = |raw| {
            let event = of(gpu, raw)?;
            event.clock.clone().filter(|_| event.has_time).ok_or(INVALID_HANDLE)
        };
        let (start, end) = (clock(start)?, clock(end)?);
        if !gpu.queue.is_done(&start) || !gpu.queue.is_done(&end) {
            return Err(NOT_READY);
        }
        // SAFETY: per the header's contract.
        unsafe { store(milliseconds, (end.sum() as f32 - start.sum() as f32) / 1e3) }
    }))
}
