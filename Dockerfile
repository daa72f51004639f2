# A slim serving image: the base install, without torch.
#
#   docker build -t maskrcnn-trt .
#   docker run --rm -p 8500:8500 -v "$PWD/bundle:/bundle:ro" maskrcnn-trt
FROM python:3.12-slim AS build
WORKDIR /source
COPY . .
# The lock constrains the versions; it also holds the training extras, which are not installed.
RUN sed -e 's/ *\\$//' -e '/^ *--hash=/d' requirements.lock > constraints.txt \
 && python -m venv /opt/maskrcnn \
 && /opt/maskrcnn/bin/pip install --no-cache-dir --constraint constraints.txt .

FROM python:3.12-slim
COPY --from=build /opt/maskrcnn /opt/maskrcnn
RUN useradd --create-home maskrcnn
USER maskrcnn
EXPOSE 8500
STOPSIGNAL SIGTERM
ENTRYPOINT ["/opt/maskrcnn/bin/maskrcnn"]
CMD ["serve", "/bundle", "--host", "0.0.0.0"]
