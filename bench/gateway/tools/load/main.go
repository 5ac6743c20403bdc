// A load generator for benchmarks: as many connections as asked, each sending one request after the other on a raw
// socket, for a bounded time. Prints one line of JSON.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"
)

type tally struct {
	requests, failures, events int
	latencies, firstEvents     []time.Duration
}

func main() {
	address := flag.String("address", "", "host:port to send to")
	connections := flag.Int("connections", 32, "how many at once")
	seconds := flag.Float64("seconds", 3, "for how long")
	stream := flag.Bool("stream", false, "ask for event streams")
	hold := flag.Bool("hold", false, "open one stream per connection, keep it open for the whole time, then leave")
	flag.Parse()

	body := `{"model":"bench","messages":[{"role":"user","content":"Is anybody there?"}]}`
	if *stream || *hold {
		body = strings.Replace(body, "{", `{"stream":true,`, 1)
	}
	request := []byte(fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n"+
		"Accept: */*\r\nUser-Agent: cortex-bench\r\nAuthorization: Bearer bench\r\nContent-Length: %d\r\n\r\n%s",
		*address, len(body), body))

	start := time.Now()
	deadline := start.Add(time.Duration(*seconds * float64(time.Second)))
	tallies := make([]tally, *connections)
	var group sync.WaitGroup
	for i := range tallies {
		group.Add(1)
		go func(t *tally) {
			defer group.Done()
			if *hold {
				t.holdOne(*address, request, deadline)
			} else {
				t.sendMany(*address, request, deadline)
			}
		}(&tallies[i])
		if *hold {
			time.Sleep(200 * time.Microsecond)
		}
	}
	group.Wait()
	report(tallies, time.Since(start))
}

func (t *tally) sendMany(address string, request []byte, deadline time.Time) {
	connection, err := net.Dial("tcp", address)
	if err != nil {
		t.failures++
		return
	}
	defer connection.Close()
	reader := bufio.NewReaderSize(connection, 64*1024)
	for time.Now().Before(deadline) {
		began := time.Now()
		if _, err = connection.Write(request); err == nil {
			err = t.readAnswer(reader, began)
		}
		if err != nil {
			t.failures++
			return
		}
		t.requests++
		t.latencies = append(t.latencies, time.Since(began))
	}
}

func (t *tally) holdOne(address string, request []byte, deadline time.Time) {
	connection, err := net.Dial("tcp", address)
	if err != nil {
		t.failures++
		return
	}
	defer connection.Close()
	began := time.Now()
	connection.Write(request)
	connection.SetReadDeadline(deadline)
	err = t.readAnswer(bufio.NewReader(connection), began)
	if len(t.firstEvents) == 1 && errors.Is(err, os.ErrDeadlineExceeded) {
		t.requests++
	} else {
		t.failures++
	}
}

// readAnswer reads one response. Events are counted by their blank lines: a gateway may join or split chunks.
func (t *tally) readAnswer(reader *bufio.Reader, began time.Time) error {
	status, err := reader.ReadSlice('\n')
	if err != nil {
		return err
	}
	if !bytes.HasPrefix(status, []byte("HTTP/1.1 200")) {
		return fmt.Errorf("status %q", status)
	}
	length := -1
	for {
		header, err := reader.ReadSlice('\n')
		if err != nil {
			return err
		}
		if len(header) <= 2 {
			break
		}
		if len(header) > 15 && bytes.EqualFold(header[:15], []byte("content-length:")) {
			length, _ = strconv.Atoi(string(bytes.TrimSpace(header[15:])))
		}
	}
	if length >= 0 {
		_, err = reader.Discard(length)
		return err
	}
	var data []byte
	for first := true; ; first = false {
		size, err := reader.ReadSlice('\n')
		if err != nil {
			return err
		}
		n, err := strconv.ParseInt(string(bytes.TrimSpace(size)), 16, 32)
		if err != nil {
			return err
		}
		if cap(data) < int(n)+2 {
			data = make([]byte, int(n)+2)
		}
		data = data[:n+2]
		if _, err = io.ReadFull(reader, data); err != nil {
			return err
		}
		if n == 0 {
			return nil
		}
		if first {
			t.firstEvents = append(t.firstEvents, time.Since(began))
		}
		t.events += bytes.Count(data, []byte("\n\n"))
	}
}

func report(tallies []tally, elapsed time.Duration) {
	var sum tally
	for _, t := range tallies {
		sum.requests += t.requests
		sum.failures += t.failures
		sum.events += t.events
		sum.latencies = append(sum.latencies, t.latencies...)
		sum.firstEvents = append(sum.firstEvents, t.firstEvents...)
	}
	json.NewEncoder(os.Stdout).Encode(map[string]interface{}{
		"requests": sum.requests, "failures": sum.failures, "events": sum.events, "seconds": elapsed.Seconds(),
		"p50_ms": quantile(sum.latencies, 0.5), "p99_ms": quantile(sum.latencies, 0.99),
		"first_p50_ms": quantile(sum.firstEvents, 0.5), "first_p99_ms": quantile(sum.firstEvents, 0.99),
	})
}

func quantile(values []time.Duration, q float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sort.Slice(values, func(i, j int) bool { return values[i] < values[j] })
	return float64(values[int(q*float64(len(values)-1))].Microseconds()) / 1000
}
