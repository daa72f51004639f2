# Two images. `serving` (the default) has the extras that the build argument EXTRAS names, so it has
# torch only if EXTRAS contains torch. `training` is for training and export.
#
#   docker build --tag maskrcnn-trt .
#   docker run --rm -p 8500:8500 -v "$PWD/bundle:/bundle:ro" maskrcnn-trt
#
#   docker build --build-arg EXTRAS=torch --tag maskrcnn-trt-gpu .
#   docker run --rm --gpus all -p 8500:8500 -v "$PWD/bundle:/bundle:ro" maskrcnn-trt-gpu
#
#   docker build --target training --tag maskrcnn-trt-training .
#   docker run --rm --gpus all --ipc host -v "$PWD/data:/home/maskrcnn/data:ro" \
#       -v "$PWD/runs:/home/maskrcnn/runs" maskrcnn-trt-training train 1x-1gpu
ARG EXTRAS=cpu

FROM python:3.12-slim AS source
WORKDIR /source
COPY . .
# The lock pins all extras. As a constraints file it pins only what an image installs.
RUN sed -e 's/ *\\$//' -e '/^ *--hash=/d' requirements.lock > constraints.txt \
 && python -m venv --without-pip /opt/maskrcnn

# Wheel of pycuda, which publishes none. The CUDA headers come from NVIDIA's wheels. libcuda belongs to
# the driver, so the build links an empty library instead. /wheels is empty unless EXTRAS has pycuda.
FROM source AS pycuda-wheel
ARG EXTRAS
RUN mkdir /wheels && case ",$EXTRAS," in *,pycuda,*) \
        apt-get update \
     && apt-get install --yes --no-install-recommends g++ libc6-dev \
     && pip install --no-cache-dir --no-deps --target /cuda \
            "nvidia-cuda-profiler-api==13.0.*" "nvidia-cuda-runtime==13.0.*" \
     && echo | gcc -shared -Wl,-soname,libcuda.so.1 -x c - -o /cuda/libcuda.so \
     && echo "CUDA_ENABLE_CURAND = False" > "$HOME/.aksetup-defaults.py" \
     && CPLUS_INCLUDE_PATH=/cuda/nvidia/cu13/include LIBRARY_PATH=/cuda LDFLAGS=-Wl,--no-as-needed \
            pip wheel --no-cache-dir --no-deps --wheel-dir /wheels "pycuda>=2026.1" ;; \
    esac

FROM source AS serving-install
ARG EXTRAS
COPY --from=pycuda-wheel /wheels /wheels
RUN pip --python /opt/maskrcnn/bin/python install --no-cache-dir --find-links /wheels --constraint constraints.txt ".${EXTRAS:+[$EXTRAS]}"

FROM source AS training-install
RUN pip --python /opt/maskrcnn/bin/python install --no-cache-dir --constraint constraints.txt ".[train,cpu]"

# Software bill of materials. In a stage of its own, so that its tools do not touch the image.
FROM serving-install AS serving-sbom
RUN python -m venv /opt/sbom \
 && /opt/sbom/bin/pip install --no-cache-dir cyclonedx-bom==7.5.0 \
 && /opt/sbom/bin/cyclonedx-py environment --output-reproducible --output-file /sbom.json /opt/maskrcnn

FROM python:3.12-slim AS base
RUN useradd --create-home --uid 1000 maskrcnn
ENV PATH="/opt/maskrcnn/bin:$PATH"
ENTRYPOINT ["maskrcnn"]

FROM base AS training
# `maskrcnn export --engine torch` needs a C compiler, like the serving image below.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
COPY --from=training-install /opt/maskrcnn /opt/maskrcnn
WORKDIR /home/maskrcnn
USER maskrcnn
CMD ["--help"]

FROM base AS serving
ARG EXTRAS
# By default, glibc keeps up to 64 MiB of freed memory per heap. With these settings, blocks of 1 MiB
# and more, such as images, are returned at once, which adds less than a tenth to a request's CPU time.
ENV MALLOC_MMAP_THRESHOLD_=1048576 MALLOC_TRIM_THRESHOLD_=1048576
# gcc: if a bundle was exported without a GPU, or for another one, OpenAI Triton, a dependency of
# torch, compiles the C code that launches its kernels.
RUN case ",$EXTRAS," in *,torch,*) \
        apt-get update \
     && apt-get install --yes --no-install-recommends gcc libc6-dev \
     && rm -rf /var/lib/apt/lists/* ;; \
    esac
COPY --from=serving-install /opt/maskrcnn /opt/maskrcnn
COPY --from=serving-sbom /sbom.json /opt/maskrcnn/sbom.json
USER maskrcnn
EXPOSE 8500
STOPSIGNAL SIGTERM
# Checks the default port without TLS. For other servers, give `docker run` another --health-cmd.
HEALTHCHECK --interval=10s --timeout=10s --start-period=5m --retries=3 CMD ["maskrcnn", "health"]
CMD ["serve", "/bundle", "--host", "0.0.0.0"]
