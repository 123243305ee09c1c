//! Two frameworks end to end: API server, controller, scheduler, and a kubelet that starts the
//! pods' commands as processes.

use crate::frameworks::pods::{python, script};
use crate::frameworks::{SERIAL, record_launch, sums};
use anyhow::Result;
use serde_json::{Value, json};
use std::sync::PoisonError;
use switchyard_tests::{
    ControlPlane, ControllerOptions, Jobs, Kubelet, KubeletOptions, Policy, start_controller, template_on,
};

#[test]
#[ignore = "needs PyTorch and JAX: cargo xtask test --frameworks"]
fn torch_and_jax_in_the_pods_of_a_control_plane() -> Result<()> {
    let _serial = SERIAL.lock().unwrap_or_else(PoisonError::into_inner);
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(all())
}

async fn all() -> Result<()> {
    let plane = ControlPlane::shared();
    let namespace = plane.namespace("frameworks").await?;
    let mut options = KubeletOptions::new(&namespace, 2);
    options.policy = Policy::Worker;
    let kubelet = Kubelet::start(plane.config().await?, options).await?;
    let own = ControllerOptions { namespace: Some(namespace.clone()), ..ControllerOptions::default() };
    let _controller = start_controller(plane, &namespace, &own)?;
    let jobs = Jobs::new(plane.client().await?, &namespace);
    let job = |name: &str, trainer: Value| {
        let mut all = json!({"numNodes": 2, "image": "image"});
        switchyard_tests::merge(&mut all, trainer);
        json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": name},
            "spec": {"trainer": all, "template": template_on(&kubelet.nodes())},
        })
    };
    let torchrun = python("SWITCHYARD_TORCH_PYTHON")?.join("torchrun").display().to_string();
    let torch = json!({"framework": "Torch", "numProcPerNode": 2, "command": [torchrun, script("torch_sum.py")]});
    let interpreter = python("SWITCHYARD_FRAMEWORKS_PYTHON")?.join("python3").display().to_string();
    let devices = json!([{"name": "XLA_FLAGS", "value": "--xla_force_host_platform_device_count=2"}]);
    let jax = json!({"framework": "JAX", "command": [interpreter, script("jax_sum.py")], "env": devices});
    for (name, trainer, world, per_node, launcher) in
        [("torch", torch, 4, 2, "torchrun"), ("jax", jax, 2, 1, "jax.distributed.initialize")]
    {
        jobs.create(job(name, trainer)).await?;
        jobs.wait_stage(name, "Complete").await?;
        let printed: Vec<String> = (0..2).map(|rank| kubelet.log(&namespace, &format!("{name}-1-{rank}"))).collect();
        record_launch(&format!("{name}-in-pods"), launcher, &sums(&printed, world, per_node, 10)?)?;
    }
    Ok(())
}
