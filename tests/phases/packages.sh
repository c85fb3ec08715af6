# Packages of the system and of Python: their versions, and how they are installed. `tests/run` reads this file.

# Tests a server against its OpenAPI 3.1 description.
schemathesis=4.32.5
math_verify=0.9.0
# The official clients of the endpoint, an agent framework, and a library of environments.
openai=3.54.0
anthropic=2.12.0
pydantic_ai=2.68.0
verifiers=0.3.1
openenv=0.10.0
# tinker's SDK: the newest, and the last that speaks JSON alone; and its recipes.
tinker=0.38.0
tinker_json=0.24.1
tinker_cookbook=0.6.1
# Readers of the logs for trackers.
tensorboard=2.21.0
wandb=0.31.0
trackio=0.43.0
opentelemetry_proto=1.45.2
# Drives Chromium.
playwright=1.65.2
# Holds SmolLM2-135M-Instruct as a GGUF file, 98 MB.
smollm2=0.1.2
llama_cpp=0.3.36
# A rollout engine.
vllm=0.32.0
# Compiles kernels without a GPU.
nvrtc=13.0.88
# The types of JobSet and Kubernetes, and launchers.
kubeflow_trainer_api=2.3.0
skypilot=0.14.1
ray=2.60.0
# A server of the S3 protocol, with conditional puts.
moto=5.2.5
# Makes the wheel.
maturin=1.16.0

# Installs the packages in $2 and after of the system unless there is the program $1. What cannot be installed is named where it is
# missing.
install_program() {
    if ! command -v "$1" >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt_install "${@:2}"
    fi
}

# In a session of its own: the end of these tests must not interrupt it, or the system could install nothing afterwards.
apt_install() { setsid --wait apt-get install -y -qq "$@" >/dev/null 2>&1 || true; }

# Installs Python packages, $2 and after, in the environment $1 of the scratch directory. What cannot be installed is named where it is
# missing.
install_packages() {
    local environment="$scratch/$1"
    if [ -x "$environment/bin/pip" ] || "$python" -m venv "$environment" 2>/dev/null; then
        "$environment/bin/pip" install --quiet "${@:2}" 2>/dev/null || true
    fi
}

# Whether the environment $1 has the Python package $2.
has_package() { [ -x "$scratch/$1/bin/pip" ] && "$scratch/$1/bin/pip" show --quiet "$2" 2>/dev/null; }

# Whether PostgreSQL's server programs are installed.
has_postgresql() { ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1; }

# PostgreSQL's server programs. The package must not start a server of its own.
install_postgresql() {
    if ! has_postgresql && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        mkdir -p /etc/postgresql-common
        [ -e /etc/postgresql-common/createcluster.conf ] \
            || echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.conf
        apt_install postgresql
    fi
}

# Whether mpirun is that of Open MPI.
has_open_mpi() { mpirun --version 2>/dev/null | grep -q 'Open MPI'; }

# Whether programs with MPI can be compiled. The compiler alone does not tell: it comes with mpirun, without the headers.
has_mpi_headers() { mpicc -E -include mpi.h -x c /dev/null >/dev/null 2>&1; }

# The headers of Open MPI, and the library that reads them.
install_mpi_headers() {
    if ! has_mpi_headers && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt_install libopenmpi-dev libclang-dev
    fi
}

# What the phases after the tests of the workspace need, while those are built and run.
install_for_phases() {
    install_program mpirun openmpi-bin
    install_program chromium chromium
    install_packages s3 "moto[s3,server]==$moto"
    install_packages agents "openai==$openai" "pydantic-ai-slim[openai]==$pydantic_ai" "verifiers==$verifiers"
    install_packages trackers "tensorboard==$tensorboard" "wandb==$wandb" "trackio==$trackio" \
        "opentelemetry-proto==$opentelemetry_proto"
    install_packages venv "math-verify[antlr4_13_2]==$math_verify"
    install_packages venv "openai==$openai" "anthropic==$anthropic"
    # Of its many dependencies the capture proxy needs these alone.
    install_packages venv fastapi uvicorn httpx requests websockets pyyaml "fastmcp<4"
    install_packages venv --no-deps "openenv==$openenv"
    install_packages venv "playwright==$playwright"
    install_packages venv "nvidia-cuda-nvrtc==$nvrtc"
    install_packages venv "schemathesis==$schemathesis"
    install_packages tinker "tinker==$tinker"
    install_packages tinker-json "tinker==$tinker_json"
    install_packages maturin "maturin==$maturin"
}
