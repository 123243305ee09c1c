//! Switchyard's own worker.

use super::{KnownError, Role};

/// A rank that failed by itself, in the worker's wording; recognised by the form `error: rank N: …`
/// or the event `failed`.
pub(in crate::doctor) const FAILURE: &str = "worker-failure";
/// A rank that ended because of another one.
pub(in crate::doctor) const PEER: &str = "worker-peer";

/// A rank that stopped sending signs of life to the others.
pub(in crate::doctor) const SILENT: &str = "worker-silent";

pub(super) const KNOWN: [KnownError; 10] = [
    KnownError {
        id: "worker-data",
        says: "Switchyard",
        role: Role::Cause,
        texts: &[&["error[SY0301]"], &["spec.engine.data."], &["spec.engine.reader.maxBadSamples:"]],
        means: "the training data is missing, unreadable, too short, or has changed",
        look: &["the file that the line names", "switchyard explain SY0301"],
        told_by: "the inspection before the start of `switchyard run`",
        link: "",
    },
    KnownError {
        id: "worker-checkpoint",
        says: "Switchyard",
        role: Role::Cause,
        texts: &[&["error[SY0601]"], &["spec.checkpoint.path: cannot resume"]],
        means: "the checkpoint does not belong to this job, or is damaged",
        look: &["switchyard checkpoint verify on the directory", "switchyard explain SY0601"],
        told_by: "",
        link: "",
    },
    KnownError {
        id: "worker-diverged",
        says: "Switchyard",
        role: Role::Cause,
        texts: &[&["lower optimizer.learningRate"]],
        means: "loss or gradients are no finite numbers any more",
        look: &[
            "optimizer.learningRate and the warm-up of the schedule",
            "precision.computeType: BF16 instead of FP16",
        ],
        told_by: "",
        link: "",
    },
    KnownError {
        id: "worker-hung",
        says: "Switchyard",
        role: Role::Cause,
        texts: &[&["stands still for", ", since "], &["all ranks wait for each other; this one is behind"]],
        means: "this rank was alive and made no progress for longer than failurePolicy.progressTimeoutSeconds",
        look: &[
            "what the line says that it was doing: a reader or a checkpoint waits for a file system, a layer for something of its own",
            "switchyard doctor on the run's directory, for the last operations of all ranks",
        ],
        told_by: "",
        link: "",
    },
    KnownError {
        id: "worker-refused",
        says: "Switchyard",
        role: Role::Cause,
        texts: &[&["refused by", ": "], &["key file", ": got "]],
        means: "ranks are not of the same job and attempt, or have different keys",
        look: &["processes left over from an older attempt", "the Secret of the job, mounted in every pod"],
        told_by: "",
        link: "",
    },
    KnownError {
        id: "worker-missing-ranks",
        says: "Switchyard",
        role: Role::Symptom,
        texts: &[&["ranks did not arrive within"], &["no connection to rank 0 at"]],
        means: "ranks did not all meet in time: one was never started, or cannot reach rank 0",
        look: &[
            "the ranks that the line names: do their pods run, and what do their logs say?",
            "a NetworkPolicy between the pods of the job",
        ],
        told_by: "",
        link: "",
    },
    KnownError {
        id: FAILURE,
        says: "Switchyard",
        role: Role::Cause,
        texts: &[&["panicked: "], &["panicked at "]],
        means: "this rank failed first; the words after it say why",
        look: &["the log of that rank before this line", "switchyard explain SY0503"],
        told_by: "",
        link: "",
    },
    KnownError {
        id: SILENT,
        says: "Switchyard",
        role: Role::Symptom,
        texts: &[&["no sign of life for"]],
        means: "the other ranks heard nothing from this rank: its process was stopped, its node stood still, or the network between them failed",
        look: &[
            "the last lines in the log of this rank, and kubectl describe of its node",
            "the network between its node and that of rank 0",
        ],
        told_by: "",
        link: "",
    },
    KnownError {
        id: PEER,
        says: "Switchyard",
        role: Role::Follower,
        texts: &[
            &["connection closed: the process ended or its network failed"],
            &["a peer failed; the root cause is on another rank"],
        ],
        means: "this rank stopped because another one had failed",
        look: &["the rank that it names"],
        told_by: "",
        link: "",
    },
    KnownError {
        id: "worker-not-saved",
        says: "Switchyard",
        role: Role::Remark,
        texts: &[&["warning: the checkpoint of step", "is not saved"]],
        means: "a checkpoint could not be written; the training went on",
        look: &["space and rights in the directory of checkpoints"],
        told_by: "",
        link: "",
    },
];
