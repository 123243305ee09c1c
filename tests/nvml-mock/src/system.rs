//! The library, and the machine as a whole.

use crate::memory::{Answer, Code, INVALID_ARGUMENT, NOT_FOUND, Out, SUCCESS};
use crate::session::{self, Handle, Session, with};
use std::ffi::{c_char, c_int, c_uint};

fn code(answer: Answer<()>) -> Code {
    answer.err().unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> Code {
    code(session::start())
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> Code {
    code(session::start())
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> Code {
    code(session::stop())
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetDriverVersion(to: Out<c_char>, room: c_uint) -> Code {
    to.text(room, with(|session| session.machine.scene.driver.clone().ok_or(NOT_FOUND)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetNVMLVersion(to: Out<c_char>, room: c_uint) -> Code {
    let version = with(|session| {
        let driver = session.machine.scene.driver.as_ref().ok_or(NOT_FOUND)?;
        Ok(format!("{}.{driver}", session.machine.scene.cuda / 1000))
    });
    to.text(room, version)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetCudaDriverVersion_v2(to: Out<c_int>) -> Code {
    to.put(with(|session| Ok(session.machine.scene.cuda)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCount_v2(to: Out<c_uint>) -> Code {
    to.put(with(|session| Ok(session.machine.gpus.len() as c_uint)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, to: Out<Handle>) -> Code {
    to.put(with(|session| {
        let handle = Handle::of(index);
        session.gpu(handle).map(|_| handle)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(device: Handle, number: c_uint, to: Out<Handle>) -> Code {
    to.put(with(|session| {
        let gpu = session.gpu(device)?;
        let profiles = session.machine.scene.mig.get(&gpu.index).ok_or(INVALID_ARGUMENT)?;
        profiles.get(number as usize).ok_or(NOT_FOUND)?;
        Ok(Session::handle_of_instance(gpu, number))
    }))
}
