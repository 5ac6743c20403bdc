// A pretend OpenAI server for benchmarks: it speaks just enough HTTP/1.1 on raw sockets to cost almost nothing.
//
// POST anything: one JSON answer, or (with "stream":true in the body) events, all at once or, with a pace, that
// much apart. GET /v1/models lists the model "bench"; GET /pace?us=N changes the pace of streams that start later.
package main

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

const answer = `{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"bench","choices":[{"index":0,` +
	`"message":{"role":"assistant","content":"All is quiet on the loopback interface this morning."},"finish_reason":"stop"}],` +
	`"usage":{"prompt_tokens":11,"completion_tokens":10,"total_tokens":21}}`

const models = `{"object":"list","data":[{"id":"bench","object":"model","created":1700000000,"owned_by":"bench"}]}`

const event = `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"bench",` +
	`"choices":[{"index":0,"delta":{"content":"word "},"finish_reason":null}]}` + "\n\n"

const lastEvents = `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"bench",` +
	`"choices":[],"usage":{"prompt_tokens":11,"completion_tokens":64,"total_tokens":75}}` + "\n\ndata: [DONE]\n\n"

const streamHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"

var paceMicroseconds int64

// A paced stream's first event comes so long after the request, as from a model that reads its prompt first.
const promptTime = 20 * time.Millisecond

func chunk(data string) []byte {
	return []byte(fmt.Sprintf("%x\r\n%s\r\n", len(data), data))
}

func whole(body string) []byte {
	return []byte(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body))
}

func main() {
	address := flag.String("address", "127.0.0.1:0", "where to listen")
	numEvents := flag.Int("events", 64, "events in a stream, the closing ones not counted")
	flag.Parse()
	listener, err := net.Listen("tcp", *address)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(listener.Addr())
	for {
		connection, err := listener.Accept()
		if err != nil {
			log.Fatal(err)
		}
		go serve(connection, *numEvents)
	}
}

func serve(connection net.Conn, numEvents int) {
	defer connection.Close()
	reader := bufio.NewReader(connection)
	wholeAnswer, wholeModels, middle, end := whole(answer), whole(models), chunk(event), append(chunk(lastEvents), "0\r\n\r\n"...)
	first := append([]byte(streamHead), middle...)
	for {
		target, body, err := readRequest(reader)
		if err != nil {
			return
		}
		switch {
		case strings.HasPrefix(target, "/pace?us="):
			microseconds, _ := strconv.ParseInt(target[len("/pace?us="):], 10, 64)
			atomic.StoreInt64(&paceMicroseconds, microseconds)
			_, err = connection.Write(whole("{}"))
		case target == "/v1/models":
			_, err = connection.Write(wholeModels)
		case bytes.Contains(body, []byte(`"stream":true`)):
			pace := time.Duration(atomic.LoadInt64(&paceMicroseconds)) * time.Microsecond
			if pace > 0 {
				time.Sleep(promptTime)
			}
			next := time.Now()
			_, err = connection.Write(first)
			for i := 1; i < numEvents && err == nil; i++ {
				if pace > 0 {
					next = next.Add(pace)
					time.Sleep(time.Until(next))
				}
				_, err = connection.Write(middle)
			}
			if err == nil {
				_, err = connection.Write(end)
			}
		default:
			_, err = connection.Write(wholeAnswer)
		}
		if err != nil {
			return
		}
	}
}

func readRequest(reader *bufio.Reader) (string, []byte, error) {
	line, err := reader.ReadString('\n')
	if err != nil {
		return "", nil, err
	}
	words := strings.SplitN(line, " ", 3)
	if len(words) != 3 {
		return "", nil, fmt.Errorf("not a request: %q", line)
	}
	length := 0
	for {
		header, err := reader.ReadSlice('\n')
		if err != nil {
			return "", nil, err
		}
		if len(header) <= 2 {
			break
		}
		if len(header) > 15 && bytes.EqualFold(header[:15], []byte("content-length:")) {
			length, _ = strconv.Atoi(string(bytes.TrimSpace(header[15:])))
		}
	}
	body := make([]byte, length)
	_, err = io.ReadFull(reader, body)
	return words[1], body, err
}
