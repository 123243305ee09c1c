//! Descriptors. Attributes are checked when set, the whole when finalized; afterwards nothing
//! changes.

use super::attributes::{Attributes, CHAR, DESCRIPTOR, INT64, NUMERICAL_NOTE, Value, attribute_specs, is_kind, size};
use super::graphs::{self, Finalized};
use super::{
    ATTRIBUTE_TYPE, BAD_PARAM, CallResult, DESCRIPTOR_TYPE, NOT_FINALIZED, NOT_INITIALIZED, NOT_SUPPORTED,
    NULL_POINTER, OUT_OF_BOUND, done, refused,
};
use crate::abi::Pointer;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;

const TAG: u64 = 0x7377_646e_6465_7363;

/// Target of a descriptor handle. The tag rejects other pointers.
#[repr(C)]
pub(super) struct Descriptor {
    tag: u64,
    kind: i32,
    attributes: Attributes<Finalized>,
    /// Set when it is finalized.
    pub(super) finalized: Option<Arc<Finalized>>,
}

/// Resolves a descriptor handle of the program.
///
/// # Safety
/// It must be null or have been created here.
pub(super) unsafe fn get<'a>(call: &str, raw: Pointer) -> CallResult<&'a mut Descriptor> {
    // SAFETY: upheld by the caller. Everything created here starts with a tag.
    let tag = unsafe { raw.cast::<u64>().as_ref() };
    if tag != Some(&TAG) {
        return refused(call, BAD_PARAM, "no descriptor, or one that was destroyed");
    }
    // SAFETY: the tag identifies the type.
    Ok(unsafe { &mut *raw.cast::<Descriptor>() })
}

/// The finalized form of a descriptor.
///
/// # Safety
/// It must be null or have been created here.
pub(super) unsafe fn finalized(call: &str, raw: Pointer) -> CallResult<Arc<Finalized>> {
    // SAFETY: upheld by the caller.
    match unsafe { get(call, raw) }?.finalized.clone() {
        Some(finalized) => Ok(finalized),
        None => refused(call, NOT_FINALIZED, "a descriptor that is not finalized"),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnBackendCreateDescriptor(kind: i32, to: *mut Pointer) -> i32 {
    const CALL: &str = "cudnnBackendCreateDescriptor";
    if to.is_null() {
        return done(refused(CALL, NULL_POINTER, "no descriptor"));
    }
    if !is_kind(kind) {
        return done(refused(CALL, NOT_SUPPORTED, &format!("descriptors of kind {kind}")));
    }
    let made = Box::new(Descriptor { tag: TAG, kind, attributes: Attributes(BTreeMap::new()), finalized: None });
    // SAFETY: the header's contract makes it writable.
    unsafe { to.write(Box::into_raw(made).cast()) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnBackendDestroyDescriptor(raw: Pointer) -> i32 {
    // SAFETY: per the header's contract.
    done(unsafe { get("cudnnBackendDestroyDescriptor", raw) }.map(|descriptor| {
        descriptor.tag = 0;
        // SAFETY: created by `cudnnBackendCreateDescriptor`, as the tag shows.
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
    // SAFETY: per the header's contract.
    let set = || unsafe {
        let descriptor = get(CALL, raw)?;
        if descriptor.finalized.is_some() {
            return refused(CALL, NOT_INITIALIZED, &format!("attribute {name} of a descriptor that is finalized"));
        }
        let Some(spec) = attribute_specs(descriptor.kind).into_iter().find(|spec| spec.name == name) else {
            return refused(CALL, NOT_SUPPORTED, &format!("attribute {name} of kind {}", descriptor.kind));
        };
        if kind != spec.kind {
            let text = format!("attribute {name}: values of type {kind}, expected {}", spec.kind);
            return refused(CALL, ATTRIBUTE_TYPE, &text);
        }
        let count = usize::try_from(count).unwrap_or(0);
        if count < spec.counts.0 || count > spec.counts.1 {
            let text = format!("attribute {name}: {count} values, expected {:?}", spec.counts);
            return refused(CALL, OUT_OF_BOUND, &text);
        }
        if values.is_null() {
            return refused(CALL, NULL_POINTER, &format!("attribute {name}: no values"));
        }
        let value = if kind == DESCRIPTOR {
            let list = std::slice::from_raw_parts(values.cast::<Pointer>(), count);
            Value::Parts(list.iter().map(|part| finalized(CALL, *part)).collect::<CallResult<_>>()?)
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
    // SAFETY: per the header's contract.
    let finalize = || unsafe {
        let descriptor = get(CALL, raw)?;
        if descriptor.finalized.is_some() {
            return refused(CALL, BAD_PARAM, "a descriptor that is finalized");
        }
        let missing = |name: &i32| !descriptor.attributes.has(*name);
        let required = attribute_specs(descriptor.kind).into_iter().filter(|spec| spec.is_required);
        if let Some(name) = required.map(|spec| spec.name).find(missing) {
            return refused(CALL, BAD_PARAM, &format!("attribute {name} is not set"));
        }
        descriptor.finalized = Some(Arc::new(graphs::finalized(CALL, descriptor.kind, &descriptor.attributes)?));
        Ok(())
    };
    done(finalize())
}

/// Copies as many values as fit, or returns their number if none are requested.
///
/// # Safety
/// `to` must have room for `most` values.
unsafe fn copy_out<T: Copy>(values: &[T], most: i64, count: *mut i64, to: Pointer) {
    let most = usize::try_from(most).unwrap_or(0);
    let given = if most == 0 { values.len() } else { values.len().min(most) };
    // SAFETY: upheld by the caller.
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
    // SAFETY: per the header's contract.
    let answer = || unsafe {
        let of = finalized(CALL, raw)?;
        match (&*of, name, kind) {
            (Finalized::Heuristic(configurations), 202, DESCRIPTOR) => {
                let list = std::slice::from_raw_parts(to.cast::<Pointer>(), usize::try_from(most).unwrap_or(0));
                let mut filled = 0i64;
                for (target, configuration) in list.iter().zip(configurations) {
                    fill(CALL, *target, Finalized::Configuration(configuration.clone()))?;
                    filled += 1;
                }
                count.write(filled);
            }
            (Finalized::Configuration(configuration), 300, DESCRIPTOR) => {
                let Some(target) = to.cast::<Pointer>().as_ref() else {
                    return refused(CALL, NULL_POINTER, "no descriptor for the engine");
                };
                fill(CALL, *target, Finalized::Engine(configuration.engine))?;
                count.write(1);
            }
            (Finalized::Engine(engine), 1303, NUMERICAL_NOTE) => copy_out(engine.notes(), most, count, to),
            (Finalized::Plan(plan), 402, INT64) => copy_out(&[plan.workspace_bytes() as i64], most, count, to),
            (Finalized::Device(text), 2702, CHAR) => copy_out(text.as_bytes(), most, count, to),
            (_, _, kind) => {
                return refused(CALL, NOT_SUPPORTED, &format!("attribute {name} with values of type {kind}"));
            }
        }
        Ok(())
    };
    done(answer())
}

/// Stores a result in a descriptor of the program, which must be of its kind and not finalized.
///
/// # Safety
/// It must be null or have been created here.
unsafe fn fill(call: &str, raw: Pointer, with: Finalized) -> CallResult<()> {
    // SAFETY: upheld by the caller.
    let target = unsafe { get(call, raw) }?;
    if target.kind != with.kind() {
        return refused(
            call,
            DESCRIPTOR_TYPE,
            &format!("a descriptor of kind {}, expected {}", target.kind, with.kind()),
        );
    }
    target.finalized = Some(Arc::new(with));
    Ok(())
}
