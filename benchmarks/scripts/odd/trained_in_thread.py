"""Training in a thread, an evaluation in another one."""

import threading

from small import data, digest, net, train

model, other = net(), net()
threads = [threading.Thread(target=train, args=(one, 100)) for one in (model, other)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(digest(model) == digest(other), digest(model), model(data()[0]).shape)
