module switchyard.dev/programs/kubeflow-trainer

go 1.24.0

require github.com/kubeflow/trainer/v2 v2.1.0
