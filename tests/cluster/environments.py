"""Variables of launchers; the first two were recorded from a rank of a real `mpirun -np 2`."""

OPENMPI_5 = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_ARGV": "dump.py",
    "OMPI_COMMAND": "python",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_FILE_LOCATION": "/tmp/ompi.4526/1/1",
    "OMPI_MCA_cpu_type": "x86_64",
    "OMPI_MCA_num_procs": "2",
    "OMPI_NUM_APP_CTX": "1",
    "OMPI_TOOL_NAME": "mpirun",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_VERSION": "5.0.11",
    "OMPI_WORLD_LOCAL_SIZE": "2",
    "OMPI_WORLD_SIZE": "2",
    "PMIX_BFROP_BUFFER_TYPE": "PMIX_BFROP_BUFFER_NON_DESC",
    "PMIX_GDS_MODULE": "shmem2,hash",
    "PMIX_HOSTNAME": "vm",
    "PMIX_NAMESPACE": "prterun-vm-4526@1",
    "PMIX_RANK": "1",
    "PMIX_SECURITY_MODE": "native",
    "PMIX_SERVER_TMPDIR": "/tmp/ompi.4526",
    "PMIX_SERVER_URI41": "prterun-vm-4526@0.0;tcp4://127.0.0.1:55941",
    "PMIX_SYSTEM_TMPDIR": "/tmp",
    "PMIX_VERSION": "5.0.11rc1",
    "PRTE_LAUNCHED": "1",
    "PRTE_SHARED_FS": "FALSE",
}
MPICH_5 = {
    "GFORTRAN_UNBUFFERED_PRECONNECTED": "y",
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "vm",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
# What is left where a shell only prepares for a launch.
PREPARED_SHELL = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "I_MPI_ROOT": "/opt/intel/mpi"}

# Intel MPI 2021.18, recorded, without most of its `I_MPI_INFO_...`; here made that of the third rank of four.
INTEL_MPI = {
    "I_MPI_HYDRA_TOPOLIB": "ipl2",
    "I_MPI_HYDRA_UUID": "51130000-62c6-675f-1b61-0600f53b4157",
    "I_MPI_INFO_LCPU": "2",
    "I_MPI_INTERNAL_MEM_POLICY": "default",
    "I_MPI_MPIRUN": "mpirun",
    "I_MPI_PIN_MAPPING": "2:0 0,1 1",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "0",
    "PMI_FD": "9",
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
}

# Written after the launchers' documentation: these launchers are not at hand.
MVAPICH_2 = {
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
    "MV2_COMM_WORLD_RANK": "5",
    "MV2_COMM_WORLD_SIZE": "8",
    "MPI_LOCALNRANKS": "4",
    "MPI_LOCALRANKID": "1",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
}
HOROVOD_GLOO = {
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "41243",
    "HOROVOD_HOSTNAME": "node1",
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_RANK": "2",
    "HOROVOD_SIZE": "4",
}
# What `horovodrun --mpi` makes of Open MPI's mpirun, recorded.
HOROVOD_MPI = {**OPENMPI_5, "NCCL_SOCKET_IFNAME": "lo", "OMPI_MCA_btl": "^openib", "OMPI_MCA_pml": "ob1"}
# Slurm 22.05, recorded from a batch script and from the second task of `srun --nodes=2`, here made those of five tasks.
SLURM_BATCH = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "3,2",
}
SLURM_STEP = {
    **SLURM_BATCH,
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[0-1]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURMD_NODENAME": "n1",
}
TPU_VM = {"TPU_ACCELERATOR_TYPE": "v4-8", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1", "TPU_WORKER_HOSTNAMES": "localhost"}

# Open MPI 4, by its documentation and its orted: the same variables as version 5, beside others.
OPENMPI_4 = {
    "OMPI_APP_CTX_NUM_PROCS": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_FIRST_RANKS": "0",
    "OMPI_MCA_ess": "^singleton",
    "OMPI_MCA_orte_ess_num_procs": "4",
    "OMPI_UNIVERSE_SIZE": "4",
    "PMIX_ID": "1234567809.3",
    "PMIX_NAMESPACE": "1234567809",
    "PMIX_RANK": "3",
    "PMIX_SERVER_TMPDIR": "/tmp/ompi.node1.1000/pid.77",
}

# What `srun --mpi=pmix` and `srun --mpi=pmi2` add, recorded.
SLURM_PMIX = {
    **SLURM_STEP,
    "PMIX_GDS_MODULE": "ds21,ds12,hash",
    "PMIX_HOSTNAME": "vm",
    "PMIX_NAMESPACE": "slurm.pmix.77.0",
    "PMIX_RANK": "4",
    "PMIX_SECURITY_MODE": "native",
    "PMIX_SERVER_URI41": "pmix-server.15868;tcp4://127.0.0.1:40353",
    "PMIX_SYSTEM_TMPDIR": "/tmp",
    "PMIX_VERSION": "4.2.2rc2",
    "SLURM_MPI_TYPE": "pmix",
    "SLURM_PMIXP_ABORT_AGENT_PORT": "39705",
    "SLURM_PMIX_MAPPING_SERV": "(vector,(0,1,3),(1,1,2))",
}
SLURM_PMI2 = {
    **SLURM_STEP,
    "PMI_FD": "13",
    "PMI_JOBID": "77.0",
    "PMI_RANK": "4",
    "PMI_SIZE": "5",
    "SLURM_MPI_TYPE": "pmi2",
}

# TF_CONFIG of platforms, by their documentation.
KUBEFLOW = {
    "TF_CONFIG": '{"cluster": {"chief": ["mnist-chief-0.ns.svc:2222"], "worker": ["mnist-worker-0.ns.svc:2222", '
    '"mnist-worker-1.ns.svc:2222"]}, "task": {"type": "worker", "index": 1}, "environment": "cloud"}'
}
SAGEMAKER = {
    "TF_CONFIG": '{"cluster": {"worker": ["algo-1:8890", "algo-2:8890"]}, "environment": "cloud", '
    '"task": {"index": 1, "type": "worker"}}'
}
VERTEX_AI = {
    "CLUSTER_SPEC": '{"cluster": {"workerpool0": ["cmle-training-workerpool0-0:2222"]}}',
    "TF_CONFIG": '{"cluster": {"chief": ["cmle-training-chief-0:2222"], "worker": ["cmle-training-worker-0:2222"]}, '
    '"environment": "cloud", "job": "{}", "task": {"index": 0, "type": "chief"}}',
}
