//! Stream capture and graphs.

use super::{Kind, Pointer, done, handle, index, store, stream, with};
use crate::code::{CallResult, INVALID_HANDLE, NOT_SUPPORTED};
use crate::gpu::Graph;
use crate::gpu::queue::DEFAULT;

const THREAD_LOCAL: u32 = 1;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamBeginCapture_v2(raw: Pointer, mode: u32) -> i32 {
    done(with(|gpu| {
        let stream = stream(gpu, raw)?;
        if stream == DEFAULT || mode != THREAD_LOCAL {
            return Err(NOT_SUPPORTED);
        }
        gpu.graphs.begin(stream)
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(raw: Pointer, graph: *mut Pointer) -> i32 {
    done(with(|gpu| {
        let stream = stream(gpu, raw)?;
        let number = gpu.graphs.end(stream)?;
        // SAFETY: per the header's contract.
        unsafe { store(graph, handle(Kind::Graph, number)) }
    }))
}

fn find(graphs: &[Option<Graph>], kind: Kind, raw: Pointer) -> CallResult<Graph> {
    graphs.get(index(kind, raw)?).cloned().flatten().ok_or(INVALID_HANDLE)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphInstantiateWithFlags(executable: *mut Pointer, graph: Pointer, flags: u64) -> i32 {
    done(with(|gpu| {
        if flags != 0 {
            return Err(NOT_SUPPORTED);
        }
        let graph = find(&gpu.graphs.captured, Kind::Graph, graph)?;
        gpu.graphs.executables.push(Some(graph));
        // SAFETY: per the header's contract.
        unsafe { store(executable, handle(Kind::Executable, gpu.graphs.executables.len() - 1)) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphLaunch(executable: Pointer, raw: Pointer) -> i32 {
    done(with(|gpu| {
        let stream = stream(gpu, raw)?;
        gpu.graphs.refuse_for(stream, "cuGraphLaunch")?;
        let graph = find(&gpu.graphs.executables, Kind::Executable, executable)?;
        crate::nvtx::queued("a graph");
        gpu.launch_graph(&graph, stream);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphDestroy(graph: Pointer) -> i32 {
    done(with(|gpu| {
        find(&gpu.graphs.captured, Kind::Graph, graph)?;
        gpu.graphs.captured[index(Kind::Graph, graph)?] = None;
        Ok(())
    }))
}

/// Launches that are already queued still run.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphExecDestroy(executable: Pointer) -> i32 {
    done(with(|gpu| {
        find(&gpu.graphs.executables, Kind::Executable, executable)?;
        gpu.graphs.executables[index(Kind::Executable, executable)?] = None;
        Ok(())
    }))
}
