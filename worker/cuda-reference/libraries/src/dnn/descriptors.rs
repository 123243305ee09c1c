//! Descriptors: what is set is checked at once, the whole when it is finalized, and nothing changes after that.

use super::attributes::{Attributes, CHAR, DESCRIPTOR, INT64, KINDS, NUMERICAL_NOTE, Value, known, size};
use super::graphs::{self, Made};
use super::{
    ATTRIBUTE_TYPE, Answer, BAD_PARAM, DESCRIPTOR_TYPE, NOT_FINALIZED, NOT_INITIALIZED, NOT_SUPPORTED, NULL_POINTER,
    OUT_OF_BOUND, done, refused,
};
use crate::abi::Pointer;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;

const TAG: u64 = 0x7377_646e_6465_7363;

/// What a descriptor of a program points to. The tag keeps other pointers from being taken for one.
#[repr(C)]
pub(super) struct Descriptor {
    tag: u64,
    kind: i32,
    attributes: Attributes<Made>,
    /// Once it is finalized.
    pub(super) made: Option<Arc<Made>>,
}

/// What a descriptor of a program is.
///
/// # Safety
/// It is null or was made here.
pub(super) unsafe fn get<'a>(call: &str, raw: Pointer) -> Answer<&'a mut Descriptor> {
    // SAFETY: as the caller promises. The tag is first in everything that was made here.
    let tag = unsafe { raw.cast::<u64>().as_ref() };
    if tag != Some(&TAG) {
        return refused(call, BAD_PARAM, "no descriptor, or one that was destroyed");
    }
    // SAFETY: the tag says what it is.
    Ok(unsafe { &mut *raw.cast::<Descriptor>() })
}

/// What a descriptor has become.
///
/// # Safety
/// It is null or was made here.
pub(super) unsafe fn made(call: &str, raw: Pointer) -> Answer<Arc<Made>> {
    // SAFETY: as the caller promises.
    match unsafe { get(call, raw) }?.made.clone() {
        Some(made) => Ok(made),
        None => refused(call, NOT_FINALIZED, "a descriptor that is not finalized"),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnBackendCreateDescriptor(kind: i32, to: *mut Pointer) -> i32 {
    const CALL: &str = "cudnnBackendCreateDescriptor";
    if to.is_null() {
        return done(refused(CALL, NULL_POINTER, "no descriptor"));
    }
    if !KINDS.contains(&kind) {
        return done(refused(CALL, NOT_SUPPORTED, &format!("descriptors of kind {kind}")));
    }
    let made = Box::new(Descriptor { tag: TAG, kind, attributes: Attributes(BTreeMap::new()), made: None });
    // SAFETY: the header says that it may be written.
    unsafe { to.write(Box::into_raw(made).cast()) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnBackendDestroyDescriptor(raw: Pointer) -> i32 {
    // SAFETY: as the header says.
    done(unsafe { get("cudnnBackendDestroyDescriptor", raw) }.map(|descriptor| {
        descriptor.tag = 0;
        // SAFETY: it was made by `cudnnBackendCreateDescriptor`, as the tag has said.
        drop(unsafe { Box::from_raw(raw.cast::<Descriptor>()) });
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnBackendSetAttribute(
    raw: Pointer,
    name: i32,
    kind: i32,
    count: i64,
    values: *const c_void,
) -> i32 {
    const CALL: &str = "cudnnBackendSetAttribute";
    // SAFETY: as the header says.
    let set = || unsafe {
        let descriptor = get(CALL, raw)?;
        if descriptor.made.is_some() {
            return refused(CALL, NOT_INITIALIZED, &format!("attribute {name} of a descriptor that is finalized"));
        }
        let Some(known) = known(descriptor.kind).into_iter().find(|known| known.name == name) else {
            return refused(CALL, NOT_SUPPORTED, &format!("attribute {name} of kind {}", descriptor.kind));
        };
        if kind != known.kind {
            let text = format!("attribute {name}: values of type {kind}, expected {}", known.kind);
            return refused(CALL, ATTRIBUTE_TYPE, &text);
        }
        let count = usize::try_from(count).unwrap_or(0);
        if count < known.counts.0 || count > known.counts.1 {
            let text = format!("attribute {name}: {count} values, expected {:?}", known.counts);
            return refused(CALL, OUT_OF_BOUND, &text);
        }
        if values.is_null() {
            return refused(CALL, NULL_POINTER, &format!("attribute {name}: no values"));
        }
        let value = if kind == DESCRIPTOR {
            let list = std::slice::from_raw_parts(values.cast::<Pointer>(), count);
            Value::Parts(list.iter().map(|part| made(CALL, *part)).collect::<Answer<_>>()?)
        } else {
            Value::Bytes(std::slice::from_raw_parts(values.cast::<u8>(), count * size(kind)).to_vec())
        };
        descriptor.attributes.0.insert(name, value);
        Ok(())
    };
    done(set())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnBackendFinalize(raw: Pointer) -> i32 {
    const CALL: &str = "cudnnBackendFinalize";
    // SAFETY: as the header says.
    let finalize = || unsafe {
        let descriptor = get(CALL, raw)?;
        if descriptor.made.is_some() {
            return refused(CALL, BAD_PARAM, "a descriptor that is finalized");
        }
        let missing = |name: &i32| !descriptor.attributes.has(*name);
        let required = known(descriptor.kind).into_iter().filter(|known| known.is_required);
        if let Some(name) = required.map(|known| known.name).find(missing) {
            return refused(CALL, BAD_PARAM, &format!("attribute {name} is not set"));
        }
        descriptor.made = Some(Arc::new(graphs::made(CALL, descriptor.kind, &descriptor.attributes)?));
        Ok(())
    };
    done(finalize())
}

/// Gives as many values as fit, and says how many there are if none is wanted.
///
/// # Safety
/// `to` may take `most` values.
unsafe fn give<T: Copy>(values: &[T], most: i64, count: *mut i64, to: Pointer) {
    let most = usize::try_from(most).unwrap_or(0);
    let given = if most == 0 { values.len() } else { values.len().min(most) };
    // SAFETY: as the caller promises.
    unsafe {
        if !count.is_null() {
            count.write(given as i64);
        }
        if most > 0 {
            std::ptr::copy_nonoverlapping(values.as_ptr(), to.cast::<T>(), given);
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnBackendGetAttribute(
    raw: Pointer,
    name: i32,
    kind: i32,
    most: i64,
    count: *mut i64,
    to: Pointer,
) -> i32 {
    const CALL: &str = "cudnnBackendGetAttribute";
    // SAFETY: as the header says.
    let answer = || unsafe {
        let of = made(CALL, raw)?;
        match (&*of, name, kind) {
            (Made::Heuristic(configurations), 202, DESCRIPTOR) => {
                let list = std::slice::from_raw_parts(to.cast::<Pointer>(), usize::try_from(most).unwrap_or(0));
                let mut filled = 0i64;
                for (target, configuration) in list.iter().zip(configurations) {
                    fill(CALL, *target, Made::Configuration(configuration.clone()))?;
                    filled += 1;
                }
                count.write(filled);
            }
            (Made::Configuration(configuration), 300, DESCRIPTOR) => {
                let Some(target) = to.cast::<Pointer>().as_ref() else {
                    return refused(CALL, NULL_POINTER, "no descriptor for the engine");
                };
                fill(CALL, *target, Made::Engine(configuration.engine))?;
                count.write(1);
            }
            (Made::Engine(engine), 1303, NUMERICAL_NOTE) => give(engine.notes(), most, count, to),
            (Made::Plan(plan), 402, INT64) => give(&[plan.workspace_bytes() as i64], most, count, to),
            (Made::Device(text), 2702, CHAR) => give(text.as_bytes(), most, count, to),
            (Made::Plan(plan), 405, CHAR) => give(plan.text().as_bytes(), most, count, to),
            (_, _, kind) => {
                return refused(CALL, NOT_SUPPORTED, &format!("attribute {name} with values of type {kind}"));
            }
        }
        Ok(())
    };
    done(answer())
}

/// Makes a descriptor of the program, which is of the kind and not finalized, a result.
///
/// # Safety
/// It is null or was made here.
unsafe fn fill(call: &str, raw: Pointer, with: Made) -> Answer<()> {
    // SAFETY: as the caller promises.
    let target = unsafe { get(call, raw) }?;
    if target.kind != with.kind() {
        return refused(
            call,
            DESCRIPTOR_TYPE,
            &format!("a descriptor of kind {}, expected {}", target.kind, with.kind()),
        );
    }
    target.made = Some(Arc::new(with));
    Ok(())
}
