//! Bugs that the fault tests must catch. Only with the feature `planted`, which no program that is shipped has.

/// Whether this bug is planted.
#[cfg(not(feature = "planted"))]
pub(crate) const fn bug(_name: &str) -> bool {
    false
}

/// Whether this bug is planted: `SWITCHYARD_PLANTED` names it.
#[cfg(feature = "planted")]
pub(crate) fn bug(name: &str) -> bool {
    static BUG: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    BUG.get_or_init(|| std::env::var("SWITCHYARD_PLANTED").ok()).as_deref() == Some(name)
}
