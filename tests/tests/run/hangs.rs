//! Hangs: a stuck rank is named, the job restarts or ends with a dedicated exit code, and `doctor`
//! explains what happened.

use super::{TIMEOUT, fault, run, scene};
use serde_json::json;

#[test]
fn a_hung_rank_is_restarted_and_the_doctor_explains_it() {
    let policy = json!({"maxRestarts": 1, "progressTimeoutSeconds": 4});
    let (scene, manifest) = scene(|manifest| fault(manifest, "stall:4@1#1").with("failurePolicy", policy));
    let ended = run(&scene, &manifest, &[]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    for part in
        ["rank 1 failed first", "stands still for 4 s", "reports and files after step 3", "restart 1 of 1: attempt 2"]
    {
        assert!(ended.stderr.contains(part), "{part}: {}", ended.stderr);
    }
    let diagnosis = scene.switchyard(["doctor", "out", "-o", "json"]).start().wait(TIMEOUT);
    assert_eq!(diagnosis.code, Some(0), "{}", diagnosis.stderr);
    let diagnosis: serde_json::Value = serde_json::from_str(&diagnosis.stdout).unwrap();
    let recorder_text = |attempt: usize| diagnosis["recorders"][attempt]["text"].as_str().unwrap_or_default();
    for part in ["rank 1 on ", " stood still for 4", "step 3", "rank 0: step 4: waiting for the all-reduce"] {
        assert!(recorder_text(0).contains(part), "{part}: {diagnosis}");
    }
    assert!(recorder_text(1).starts_with("all 2 ranks finished after step "), "{diagnosis}");
    assert_eq!(diagnosis["attempts"][0]["first"]["id"], "worker-hung", "{diagnosis}");
    scene.assert_nothing_left();
}

#[test]
fn without_a_restart_a_hang_has_its_own_exit_code() {
    let policy = json!({"progressTimeoutSeconds": 4});
    let (scene, manifest) = scene(|manifest| fault(manifest, "stall:4@0").with("failurePolicy", policy));
    let ended = run(&scene, &manifest, &[]);
    assert_eq!(ended.code, Some(10), "{}", ended.stderr);
    assert!(ended.stderr.contains("rank 0 failed first"), "{}", ended.stderr);
    scene.assert_nothing_left();
}
