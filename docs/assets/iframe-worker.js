// A page that is opened as a file may not start a worker: the script of the search runs in a hidden frame instead.
if (location.protocol === "file:") {
    window.Worker = class {
        constructor(url) {
            this.frame = document.createElement("iframe");
            this.frame.hidden = true;
            this.frame.receive = (data) => setTimeout(() => this.onmessage?.({ data: structuredClone(data) }));
            this.frame.srcdoc =
                "<script>var postMessage = (data) => frameElement.receive(data)</script>" +
                `<script src="${url}"></script>`;
            this.loaded = new Promise((done) => (this.frame.onload = done));
            document.body.append(this.frame);
        }

        postMessage(data) {
            this.loaded.then(() => this.frame.contentWindow.onmessage({ data: structuredClone(data) }));
        }

        terminate() {
            this.frame.remove();
        }
    };
}
