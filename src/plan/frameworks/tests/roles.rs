//! Environment of jobs with roles.

use super::*;

fn with_roles(framework: &str, roles: Value, success: &str) -> Result<(TrainJob, ValidJob), String> {
    let document = json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "job"},
        "spec": {
            "trainer": {"framework": framework, "image": "image", "env": [{"name": "A", "value": "all"}, {"name": "B", "value": "all"}]},
            "roles": roles,
            "successPolicy": {"role": success},
        },
    });
    let mut job = switchyard_crds::validate::train_job(&document).map_err(|faults| format!("{faults:?}"))?;
    job.metadata.namespace = Some("team".into());
    job.metadata.uid = Some("5d3f8a52-4a44-4d2a-9d0e-0123456789ab".into());
    let valid =
        validate(&job).map_err(|faults| faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))?;
    Ok((job, valid))
}

fn value(job: &(TrainJob, ValidJob), rank: u32, name: &str) -> Option<String> {
    let entry = trainer(job, rank).env.unwrap().into_iter().find(|entry| entry.name == name)?;
    entry.value
}

#[test]
fn every_pod_knows_its_role_and_the_hosts_of_all_roles() {
    let roles = json!([
        {"name": "learner", "env": [{"name": "B", "value": "own"}], "command": ["learn"]},
        {"name": "actor-gpu", "replicas": 2, "args": ["--act"], "image": "other"},
    ]);
    let job = with_roles("Plain", roles, "learner").unwrap();
    for (rank, role, index) in [(0, "learner", "0"), (1, "actor-gpu", "0"), (2, "actor-gpu", "1")] {
        let of = |name: &str| value(&job, rank, name);
        assert_eq!(
            (of("SWITCHYARD_ROLE").as_deref(), of("SWITCHYARD_ROLE_INDEX").as_deref()),
            (Some(role), Some(index))
        );
        assert_eq!(of("SWITCHYARD_HOSTS_LEARNER").as_deref(), Some("job-3-0.job.team.svc"));
        assert_eq!(of("SWITCHYARD_HOSTS_ACTOR_GPU").as_deref(), Some("job-3-1.job.team.svc,job-3-2.job.team.svc"));
        assert_eq!(
            (of("SWITCHYARD_NODE_RANK"), of("SWITCHYARD_NUM_NODES")),
            (Some(rank.to_string()), Some("3".into()))
        );
        assert_eq!(of("A").as_deref(), Some("all"));
    }
    assert_eq!((value(&job, 0, "B").as_deref(), value(&job, 1, "B").as_deref()), (Some("own"), Some("all")));
    let (first, last) = (trainer(&job, 0), trainer(&job, 2));
    assert_eq!((first.command, first.args, first.image.as_deref()), (Some(vec!["learn".into()]), None, Some("image")));
    assert_eq!((last.command, last.args, last.image.as_deref()), (None, Some(vec!["--act".into()]), Some("other")));
}

#[test]
fn only_the_role_that_trains_joins_the_rendezvous() {
    let limits = |gpus: u32| json!({"limits": {"nvidia.com/gpu": gpus}});
    let roles = json!([
        {"name": "eval", "rendezvous": "None", "resourcesPerNode": limits(2)},
        {"name": "trainer", "replicas": 2, "rendezvous": "Join", "resourcesPerNode": limits(8)},
    ]);
    let job = with_roles("Torch", roles, "trainer").unwrap();
    // The role that joins has the lowest ranks, whatever its position.
    for rank in 0..2 {
        assert_eq!(value(&job, rank, "SWITCHYARD_ROLE").as_deref(), Some("trainer"));
        assert_eq!(value(&job, rank, "PET_NNODES").as_deref(), Some("2"));
        assert_eq!(value(&job, rank, "PET_NPROC_PER_NODE").as_deref(), Some("8"));
        assert_eq!(value(&job, rank, "MASTER_ADDR").as_deref(), Some("job-3-0.job.team.svc"));
        assert!(value(&job, rank, "NCCL_CONF_FILE").is_some());
    }
    assert_eq!(value(&job, 2, "SWITCHYARD_ROLE").as_deref(), Some("eval"));
    for name in ["PET_NNODES", "MASTER_ADDR", "WORLD_SIZE", "SWITCHYARD_RENDEZVOUS", "NCCL_CONF_FILE"] {
        assert_eq!(value(&job, 2, name), None, "{name}");
    }
    assert_eq!((job.1.first_rank(1), job.1.first_rank(2)), (8, 16));
    assert_eq!(objects::fabric_configs(&job.0, &job.1, 3).len(), 1);
}

#[test]
fn task_types_of_tensorflow_are_the_names_of_the_roles() {
    let roles = json!([
        {"name": "worker", "replicas": 2}, {"name": "chief"}, {"name": "ps"}, {"name": "evaluator"}, {"name": "board"},
    ]);
    let job = with_roles("TensorFlow", roles, "chief").unwrap();
    let config = |rank: u32| value(&job, rank, "TF_CONFIG").map(|text| serde_json::from_str::<Value>(&text).unwrap());
    let host = |rank: u32| format!("job-3-{rank}.job.team.svc:29400");
    let cluster = json!({"worker": [host(0), host(1)], "chief": [host(2)], "ps": [host(3)]});
    for (rank, kind, index) in [(0, "worker", 0), (1, "worker", 1), (2, "chief", 0), (3, "ps", 0), (4, "evaluator", 0)]
    {
        assert_eq!(config(rank), Some(json!({"cluster": cluster, "task": {"type": kind, "index": index}})));
    }
    assert_eq!(config(5), None);
    let faults = with_roles("TensorFlow", json!([{"name": "worker", "numProcPerNode": 2}]), "worker").unwrap_err();
    assert!(faults.starts_with("spec.roles[worker].numProcPerNode: got 2; expected nothing"), "{faults}");
}

#[test]
fn parameter_servers_of_paddle_find_each_other() {
    let roles = json!([{"name": "trainer", "replicas": 2}, {"name": "ps", "replicas": 2}, {"name": "other"}]);
    let job = with_roles("Paddle", roles, "trainer").unwrap();
    let host = |rank: u32| format!("job-3-{rank}.job.team.svc");
    for (rank, role, id) in
        [(0, "TRAINER", Some("0")), (1, "TRAINER", Some("1")), (2, "PSERVER", None), (3, "PSERVER", None)]
    {
        let of = |name: &str| value(&job, rank, name);
        assert_eq!(of("PADDLE_PSERVERS_IP_PORT_LIST").unwrap(), format!("{}:29400,{}:29400", host(2), host(3)));
        assert_eq!(of("PADDLE_TRAINER_ENDPOINTS").unwrap(), format!("{}:29400,{}:29400", host(0), host(1)));
        assert_eq!(of("PADDLE_TRAINERS_NUM").as_deref(), Some("2"));
        assert_eq!((of("TRAINING_ROLE").as_deref(), of("PADDLE_TRAINER_ID").as_deref()), (Some(role), id));
        // A server compares these two with the list.
        assert_eq!((of("POD_IP"), of("PADDLE_PORT").as_deref()), (Some(host(rank)), Some("29400")));
    }
    assert_eq!(value(&job, 4, "TRAINING_ROLE"), None);
    let faults = with_roles("Paddle", json!([{"name": "ps"}, {"name": "trainer"}]), "trainer").unwrap_err();
    assert!(faults.starts_with("spec.roles[ps].rendezvous: got Join for parameter servers"), "{faults}");
}

#[test]
fn a_launcher_starts_no_ranks_on_its_own_node() {
    let roles = json!([{"name": "launcher", "command": ["mpirun", "train"]}, {"name": "worker", "replicas": 2, "numProcPerNode": 4}]);
    let two = json!([{"name": "launcher", "replicas": 2}, {"name": "worker"}]);
    let faults = with_roles("MPI", two, "launcher").unwrap_err();
    assert!(faults.starts_with("spec.roles[launcher].replicas: got 2; expected 1"), "{faults}");
    // The launcher is node 0, whatever its position.
    let reversed = roles.as_array().unwrap().iter().rev().cloned().collect::<Vec<_>>();
    for roles in [roles, reversed.into()] {
        let job = with_roles("MPI", roles, "launcher").unwrap();
        assert_eq!(hostfile(&job.0, &job.1, 3).unwrap(), "job-3-1 slots=4\njob-3-2 slots=4\n");
        assert_eq!(trainer(&job, 0).command, Some(vec!["mpirun".into(), "train".into()]));
        assert_eq!(value(&job, 0, "PRTE_MCA_rml_base_radix").as_deref(), Some("3"));
        for rank in 1..3 {
            assert_eq!(trainer(&job, rank).command, Some(mpi::daemon()));
            assert_eq!(value(&job, rank, "PRTE_MCA_ess_base_vpid"), Some(rank.to_string()));
        }
    }
    let without =
        with_roles("MPI", json!([{"name": "worker", "replicas": 2}, {"name": "eval", "rendezvous": "None"}]), "worker")
            .unwrap();
    assert_eq!(hostfile(&without.0, &without.1, 3).unwrap(), "job-3-0 slots=1\njob-3-1 slots=1\n");
    assert_eq!(trainer(&without, 2).command, None);
}

#[test]
fn faults_name_the_role_and_its_field() {
    let gpu =
        |name: &str| json!({"name": name, "rendezvous": "Join", "resourcesPerNode": {"limits": {"nvidia.com/gpu": 1}}});
    let two = with_roles("Torch", json!([gpu("a"), gpu("b")]), "a").unwrap_err();
    assert!(two.starts_with("spec.roles[b].rendezvous: got Join for two roles with GPUs, a and b"), "{two}");
    let amount = json!([{"name": "a", "resourcesPerNode": {"limits": {"cpu": "0"}}}]);
    let amount = with_roles("Torch", amount, "a").unwrap_err();
    assert!(amount.starts_with("spec.roles[a].resourcesPerNode.limits.cpu: got `0`"), "{amount}");
    let many = json!([{"name": "a", "replicas": 4000}, {"name": "b", "replicas": 97}]);
    let many = with_roles("Torch", many, "a").unwrap_err();
    assert!(many.starts_with("spec.roles: got 4097 replicas; expected at most 4096 pods in all roles"), "{many}");
}
