//! `switchyard checkpoint`: lists, verifies and exports the checkpoints in a directory.

use crate::args::{CheckpointCommand, Cli, ExportArgs, SelectorArgs};
use crate::failure::Failure;
use crate::output::emit;
use crate::text::columns;
use jiff::Timestamp;
use serde::Serialize;
use serde_json::{Value, json};
use switchyard_checkpoint::disk::Disk;
use switchyard_checkpoint::{Checkpoint, CheckpointError, CheckpointId, State, Store, StoreEntry, export};
use switchyard_core::units::{binary, counted, grouped};
use switchyard_worker_contract::exit::Exit;

/// The result of a command: kind and value for programs, text for people.
struct CommandOutput {
    kind: &'static str,
    value: Value,
    text: String,
    exit: Exit,
}

/// Runs a subcommand.
pub(super) fn checkpoint(cli: &Cli, command: &CheckpointCommand) -> Result<Exit, Failure> {
    let CommandOutput { kind, value, text, exit } = match command {
        CheckpointCommand::List(args) => list(args),
        CheckpointCommand::Verify(args) => verify(args),
        CheckpointCommand::Export(args) => export_model(args),
    }?;
    emit(cli.output, kind, &value, || text);
    Ok(exit)
}

/// A complete or partial checkpoint.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    step: u64,
    attempt: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    job: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    world: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    created: Option<Timestamp>,
    state: RowState,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    faults: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
enum RowState {
    /// All lengths are correct.
    Complete,
    /// All digests are correct.
    Verified,
    Incomplete,
    Damaged,
}

impl Row {
    fn new(found: &StoreEntry) -> Row {
        let CheckpointId { step, attempt } = found.id;
        let empty =
            |state, faults| Row { step, attempt, job: None, world: None, bytes: None, created: None, state, faults };
        match &found.state {
            State::Complete(checkpoint) => {
                let manifest = checkpoint.manifest();
                let seconds = i64::try_from(manifest.info().created).ok();
                Row {
                    job: Some(manifest.info().job.clone()),
                    world: Some(manifest.plan().world()),
                    bytes: Some(manifest.bytes()),
                    created: seconds.and_then(|seconds| Timestamp::from_second(seconds).ok()),
                    ..empty(RowState::Complete, Vec::new())
                }
            }
            State::Incomplete => empty(RowState::Incomplete, Vec::new()),
            State::Damaged(error) => empty(RowState::Damaged, vec![error.to_string()]),
        }
    }

    fn cells(&self) -> Vec<String> {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_string());
        vec![
            grouped(self.step),
            self.attempt.to_string(),
            or_dash(self.job.clone()),
            or_dash(self.world.map(|world| world.to_string())),
            or_dash(self.bytes.map(binary)),
            or_dash(self.created.map(|created| created.to_string())),
            match self.state {
                RowState::Complete => "complete",
                RowState::Verified => "verified",
                RowState::Incomplete => "incomplete",
                RowState::Damaged => "damaged",
            }
            .to_string(),
        ]
    }
}

/// A table of checkpoints, followed by their errors.
fn answer(kind: &'static str, rows: &[Row], exit: Exit) -> CommandOutput {
    let head = ["STEP", "ATTEMPT", "JOB", "RANKS", "SIZE", "CREATED", "STATE"].map(str::to_string).to_vec();
    let lines: Vec<Vec<String>> = std::iter::once(head).chain(rows.iter().map(Row::cells)).collect();
    let mut text = if rows.is_empty() { "no checkpoints".to_string() } else { columns(&lines) };
    for fault in rows.iter().flat_map(|row| &row.faults) {
        text.push_str(&format!("\n{fault}"));
    }
    CommandOutput { kind, value: json!({"checkpoints": rows}), text, exit }
}

/// The requested checkpoints, newest first.
fn find(args: &SelectorArgs) -> Result<Vec<StoreEntry>, Failure> {
    let name = args.directory.display();
    // A store treats a missing directory as empty; on the command line it is a typo.
    if !args.directory.is_dir() {
        return Err(Failure::usage(format!("{name}: not a directory; expected the directory of a job's checkpoints")));
    }
    let found = Store::new(&Disk, &args.directory).list().map_err(Failure::unexpected)?;
    let is_meant = |found: &StoreEntry| {
        args.step.is_none_or(|step| found.id.step == step)
            && args.attempt.is_none_or(|attempt| found.id.attempt == attempt)
    };
    let is_chosen = args.step.is_some() || args.attempt.is_some();
    let known: Vec<String> = found.iter().map(|found| grouped(found.id.step)).collect();
    let meant: Vec<StoreEntry> = found.into_iter().filter(is_meant).collect();
    if meant.is_empty() && is_chosen {
        let known = if known.is_empty() { "none".to_string() } else { format!("steps {}", known.join(", ")) };
        return Err(Failure::usage(format!(
            "{name}: got no such checkpoint; expected one of the existing ones: {known}"
        )));
    }
    Ok(meant)
}

fn list(args: &SelectorArgs) -> Result<CommandOutput, Failure> {
    let rows: Vec<Row> = find(args)?.iter().map(Row::new).collect();
    Ok(answer("CheckpointList", &rows, Exit::Done))
}

/// An unfinished checkpoint is not an error if another one is usable, because every crash leaves
/// one.
fn verify(args: &SelectorArgs) -> Result<CommandOutput, Failure> {
    let store = Store::new(&Disk, &args.directory);
    let verified = |found: &StoreEntry| {
        let mut row = Row::new(found);
        if let State::Complete(checkpoint) = &found.state {
            row.faults = store.verify(checkpoint).iter().map(CheckpointError::to_string).collect();
            row.state = if row.faults.is_empty() { RowState::Verified } else { RowState::Damaged };
        }
        row
    };
    let rows: Vec<Row> = find(args)?.iter().map(verified).collect();
    let has = |state| rows.iter().any(|row| row.state == state);
    let is_good = has(RowState::Verified) && !has(RowState::Damaged);
    Ok(answer("CheckpointVerification", &rows, if is_good { Exit::Done } else { Exit::CheckpointRefused }))
}

/// Exports the newest matching checkpoint. Fails if that is damaged, because an older model is not
/// what the user requested.
fn export_model(args: &ExportArgs) -> Result<CommandOutput, Failure> {
    let name = args.selector.directory.display();
    let found = find(&args.selector)?;
    let newest = found.into_iter().find(|found| !matches!(found.state, State::Incomplete));
    let checkpoint: Checkpoint = match newest.map(|found| found.state) {
        Some(State::Complete(checkpoint)) => *checkpoint,
        Some(State::Damaged(error)) => return Err(damaged(&error)),
        Some(State::Incomplete) | None => {
            let message = format!("{name}: got no complete checkpoint; expected one");
            return Err(Failure::new(message, Exit::CheckpointRefused));
        }
    };
    let store = Store::new(&Disk, &args.selector.directory);
    let exported = export::export(&Disk, &store, &checkpoint, &args.to).map_err(|error| match &error {
        CheckpointError::Io { file, .. } if *file == args.to => Failure::unexpected(error),
        _ => damaged(&error),
    })?;
    let CheckpointId { step, attempt } = checkpoint.manifest().info().id;
    let (tensors, bytes) = (exported.tensors, exported.bytes);
    let to = args.to.display().to_string();
    let text = format!(
        "{to}: {} of step {}, attempt {attempt}, {}",
        counted(tensors as u64, "tensor"),
        grouped(step),
        binary(bytes)
    );
    let value = json!({"file": to, "step": step, "attempt": attempt, "tensors": tensors, "bytes": bytes});
    Ok(CommandOutput { kind: "CheckpointExport", value, text, exit: Exit::Done })
}

/// An error about a damaged checkpoint, with alternatives.
fn damaged(error: &CheckpointError) -> Failure {
    let message = format!("{error}\n`switchyard checkpoint verify` shows which others can be exported with --step");
    Failure::new(message, Exit::CheckpointRefused)
}

#[cfg(test)]
mod tests;
