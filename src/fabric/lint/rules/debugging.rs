//! Debug settings.

use super::{Findings, Message, Severity};
use crate::lint::view::{Setting, Variable};
use crate::variables::debugging_only;
use crate::variables::nccl::{self, GUIDE, Section};

/// `debug-setting` and `debug-section`.
pub(super) fn check(variable: &Variable, found: &mut Findings) {
    let key = nccl::find(&variable.name);
    if let Some(setting) = variable.text().and_then(|value| debugging_only(&variable.name, value)) {
        let severity = if setting.does_harm { Severity::Warning } else { Severity::Note };
        let fix = format!("delete {}, or set it while you look for a fault only", variable.name);
        let text = Message::of(variable, setting.why, fix);
        let text = if key.is_some() { text.link(GUIDE) } else { text };
        return found.add("debug-setting", severity, &variable.path, text);
    }
    // Other rules report removed, deprecated and invalid settings.
    let is_fine = |key: &&nccl::Key| {
        let can_be_read = variable.text().is_none_or(|value| key.form.check(value).is_ok());
        key.gone.is_none()
            && key.deprecated.is_none()
            && can_be_read
            && !matches!(variable.setting, Setting::NotText(_))
    };
    if key.filter(is_fine).is_some_and(|key| key.section == Section::Debugging) {
        let why = "NCCL's user guide has it in the section \"Debugging\": a fixed value keeps later releases from choosing better";
        let fix = format!("delete {} unless a measurement on these nodes asks for it", variable.name);
        found.add("debug-section", Severity::Note, &variable.path, Message::of(variable, why, fix).link(GUIDE));
    }
}
